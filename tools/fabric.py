"""Put the libraries of the optional transports beside this interpreter, for the tests and benchmarks of them.

Their wheels come without what they require: NIXL's ask for torch, and its two GPU variants for each other. Mooncake and
DLSlime link against the system's libibverbs, NIC or not; where it has none, Debian's packages are unpacked under
the environment (tests/kvconnector/libraries.py finds them there), and the system is left as it is.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SYSTEM = Path(sys.prefix) / "fabric"
SECONDS = 1800
"""For each command, of which most load something."""
PACKAGES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")


def main() -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--group", "fabric"]
    subprocess.run(pip, cwd=ROOT, check=True, timeout=SECONDS)
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        if not any(SYSTEM.rglob("libibverbs.so.1")):
            unpack()


def unpack() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for state in ("lists/partial", "archives/partial"):
            (Path(folder) / state).mkdir(parents=True)
        lists = [f"-oDir::State::lists={folder}/lists", f"-oDir::Cache::archives={folder}/archives"]
        lists.append("-oAPT::Sandbox::User=root")  # who else could not write to the folder
        # With lists of our own, as those of the system may be empty, and are root's.
        for command in (["update"], ["download", *PACKAGES]):
            subprocess.run(["apt-get", "--quiet=2", *lists, *command], cwd=folder, check=True, timeout=SECONDS)
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, SYSTEM], check=True, timeout=SECONDS)


if __name__ == "__main__":
    main()
