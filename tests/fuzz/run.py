"""Fuzz what parses bytes from outside, with atheris: `make fuzz`, or

    python tests/fuzz/run.py [--seconds N] [--corpus FOLDER] [TARGET …]

Every target has a process of its own with limits on memory and on the time of one input. An input that breaks one is
written to tests/fuzz/found/TARGET-…, where test_targets.py tries it from then on. `deeplink` must be importable.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
FOUND = HERE / "found"
MEGABYTES, SECONDS_EACH, LONGEST = 1024, 2, 16 << 10
"""Limits of a process, of one input, and the length of the longest input."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="all of them, if none is named")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--corpus", type=Path, help="where inputs that reach new code are kept from run to run")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path[:0] = [str(HERE), *(str(HERE.parent / folder) for folder in ("kvconnector", "router"))]
    if arguments.here:
        _fuzz(arguments.targets[0], arguments.seconds, arguments.corpus)
        return 0
    from seeds import SEEDS
    from targets import TARGETS

    names = arguments.targets or list(TARGETS)
    failed = []
    with tempfile.TemporaryDirectory() as made:
        for name in names:
            corpus = (arguments.corpus or Path(made)) / name
            corpus.mkdir(parents=True, exist_ok=True)
            for seed in SEEDS[name]:
                (corpus / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
            print(f"== {name}: {arguments.seconds} s", flush=True)
            command = [
                sys.executable,
                __file__,
                name,
                "--here",
                "--seconds",
                str(arguments.seconds),
                "--corpus",
                corpus,
            ]
            # libFuzzer ends itself; the limit is for the case that it hangs with the target.
            if subprocess.run(command, timeout=2 * arguments.seconds + 300).returncode:
                failed.append(name)
    print("broken: " + ", ".join(failed) if failed else f"{len(names)} targets, nothing found")
    return bool(failed)


def _fuzz(name: str, seconds: int, corpus: Path) -> None:
    """Does not return: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["deeplink"]):
        from targets import TARGETS
    target = TARGETS[name]

    def timed(data: bytes) -> None:
        began = time.process_time()
        target(data)
        if (spent := time.process_time() - began) > SECONDS_EACH:
            raise TimeoutError(f"{len(data)} bytes took {spent:.1f} s")

    FOUND.mkdir(exist_ok=True)
    flags = [
        f"-max_total_time={seconds}",
        f"-rss_limit_mb={MEGABYTES}",
        f"-timeout={10 * SECONDS_EACH}",
        f"-max_len={LONGEST}",
        f"-artifact_prefix={FOUND}{os.sep}{name}-",
        "-print_final_stats=1",
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], timed)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
