"""The repository as it is packaged: every folder listed, light to import, small modules, no engine pulled in."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points, requires, version
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]
STAND_INS = ROOT / FOLDERS["deeplink"] / "local" / "sglang_cpu"
"""Not ours to import: a folder for the path of SGLang's processes, and data of the package around it."""
MODULES = sorted(
    path for folder in FOLDERS.values() for path in (ROOT / folder).rglob("*.py") if STAND_INS not in path.parents
)
MAX_LINES = 600


BY_NAME = {"deeplink.cli": "a module per command", "deeplink.chips.catalogue": "a module per vendor"}
"""Packages whose modules need no map."""


@pytest.mark.parametrize("package", sorted(set(SETUPTOOLS["packages"]) - BY_NAME.keys()))
def test_a_package_says_what_lives_in_it(package: str) -> None:
    """Whoever opens the folder finds every module named in the text at its head."""
    name = next(name for name in sorted(FOLDERS, key=len, reverse=True) if f"{package}.".startswith(f"{name}."))
    folder = ROOT.joinpath(FOLDERS[name], *package.removeprefix(name).split("."))
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    modules |= {path.parent.name for path in folder.glob("*/__init__.py")}
    short = {module.removesuffix("_cases") for module in modules}
    assert [module for module in sorted(short) if not re.search(rf"\b{module}\b", text)] == []


def test_what_is_tested_is_this_checkout() -> None:
    """An editable install of another checkout is found only too easily."""
    for name, folder in FOLDERS.items():
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        assert Path(spec.origin).resolve().parent == ROOT / folder, name


def test_every_folder_is_listed() -> None:
    """An editable install finds a package that is not listed; the wheel leaves it out."""
    found = set()
    for name, folder in FOLDERS.items():
        for init in (path for path in MODULES if path.name == "__init__.py" and path.is_relative_to(ROOT / folder)):
            inner = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join([name, *inner]))
    assert found == set(SETUPTOOLS["packages"])


def test_no_module_outside_a_package() -> None:
    for path in MODULES:
        assert (path.parent / "__init__.py").exists(), path


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_are_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_every_entry_point_loads_where_its_engine_is_not_needed() -> None:
    assert {ep.name for ep in entry_points(group="deeplink")} == set(PROJECT["project"]["entry-points"]["deeplink"])
    for ep in entry_points(group="deeplink"):
        ep.load()


def _imported(program: str, *arguments: str) -> tuple[set[str], str]:
    """The top-level modules a fresh interpreter has loaded after `program`, and what it printed."""
    tail = "\nimport sys, json; print('\\n' + json.dumps(sorted({n.split('.')[0] for n in sys.modules})))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", program + tail, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    *printed, last = done.stdout.strip().splitlines()
    return set(json.loads(last)), "\n".join(printed)


HEAVY = {"torch", "aiohttp", "numpy", "vllm", "transformers"}
HELP = """
import sys
from deeplink.cli import main
try:
    main(sys.argv[1:], prog_name="deeplink")
except SystemExit as exc:
    assert exc.code in (0, None), exc.code
"""


def test_import_is_light() -> None:
    modules, _ = _imported("import deeplink")
    assert "deeplink" in modules
    assert not modules & (HEAVY | {"pydantic", "msgspec"})


def test_the_core_is_light() -> None:
    modules, _ = _imported("import deeplink.config, deeplink.errors, deeplink.plugins, deeplink.secret")
    assert not modules & HEAVY


def test_detection_of_chips_is_light() -> None:
    modules, _ = _imported("import deeplink.chips.detect, deeplink.chips.report, deeplink.chips.catalogue")
    assert not modules & HEAVY


def test_help_is_light() -> None:
    modules, text = _imported(HELP, "--help")
    assert "demo" in text
    assert "router" in text
    assert "contract" in text
    assert not modules & HEAVY


@pytest.mark.parametrize("arguments", [["contract", "--help"], ["contract", "diff", "--help"]])
def test_contract_is_light(arguments: list[str]) -> None:
    """It imports what it does its work with."""
    modules, text = _imported(HELP, *arguments)
    assert "Usage: deeplink contract" in text
    assert not modules & HEAVY


def test_doctor_is_light() -> None:
    modules, text = _imported(HELP, "doctor", "--help")
    assert "Usage: deeplink doctor" in text
    assert not modules & HEAVY


def test_the_doctor_brings_no_web_stack() -> None:
    modules, _ = _imported("import deeplink.doctor.examination, deeplink.doctor.link, deeplink.doctor.peer")
    assert not modules & {"torch", "aiohttp", "vllm", "transformers"}


def test_the_pure_part_of_kvconnector_is_light() -> None:
    names = ("layouts.layout", "contracts.contract", "contracts.negotiate", "contracts.compare", "handoffs.ticket")
    pure = ", ".join(f"deeplink.kvconnector.{name}" for name in names)
    modules, _ = _imported(f"import {pure}")
    assert not modules & HEAVY


def test_the_vllm_plugins_entry_is_light() -> None:
    """vLLM loads it in every process, before anything else."""
    modules, _ = _imported("import vllm_deeplink")
    assert not modules & (HEAVY | {"pydantic", "msgspec", "pluggy", "deeplink"})


def test_looking_for_a_platform_is_light() -> None:
    """Called in every process, wanted or not, before vLLM knows what it runs on."""
    modules, _ = _imported("import vllm_deeplink; vllm_deeplink.platform_plugin()")
    assert not modules & (HEAVY | {"pydantic"})


def test_the_flags_are_light() -> None:
    """They are there before the command line is read, whatever it says."""
    modules, _ = _imported("import vllm_deeplink.flags")
    assert not modules & HEAVY


def _names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9._-]", text)[0].lower() for text in requirements}


def test_a_plain_install_pulls_no_engine() -> None:
    engines = {"torch", "vllm", "sglang", "lmdeploy", "transformers", "nixl", "mooncake-transfer-engine"}
    assert not _names(PROJECT["project"]["dependencies"]) & engines


EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]


def _extra(name: str) -> set[str]:
    """What an extra brings, other extras that it names included."""
    found = _names(EXTRAS[name]) - {"deeplink"}
    for text in EXTRAS[name]:
        if inner := re.fullmatch(r"deeplink\[(.+)\]", text):
            found |= {each for one in inner[1].split(",") for each in _extra(one)}
    return found


def test_all_that_runs_on_a_cpu_brings_no_engine_and_no_torch() -> None:
    assert _extra("all-cpu") >= _extra("fast") | _extra("solver") | _extra("router") | _extra("mooncake")
    for name in set(EXTRAS) - {"vllm", "sglang", "lmdeploy", "ascend", "nixl"}:
        assert not any("torch" in one or "nixl" in one for one in _extra(name)), name
        assert not _extra(name) & {"vllm", "sglang", "lmdeploy"}


@pytest.mark.long
@pytest.mark.timeout(400)
def test_nothing_that_it_brings_asks_for_torch() -> None:
    """As the package index has it now."""
    wanted = "\n".join([*PROJECT["project"]["dependencies"], *_extra("all-cpu")])
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header", "-"]
    done = subprocess.run(command, input=wanted, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = _names(done.stdout.splitlines())
    assert {"highspy", "numba", "mooncake-transfer-engine-non-cuda"} <= found
    assert not found & {"torch", "vllm", "nvidia-cublas-cu12"}


def test_what_is_installed_pulls_no_engine() -> None:
    plain = _names([line for line in requires("deeplink") or [] if "extra ==" not in line])
    assert plain
    assert not plain & {"torch", "vllm", "sglang", "lmdeploy"}


def test_the_metadata_agrees(tmp_path: Path) -> None:
    """As setuptools writes it, which is what goes into the wheel."""
    needed = PROJECT["build-system"]["requires"][0]
    if int(version("setuptools").split(".")[0]) < int(needed.removeprefix("setuptools>=")):
        pytest.skip(f"building needs {needed}")
    program = (
        "import sys; from setuptools.build_meta import prepare_metadata_for_build_wheel as make; make(sys.argv[1])"
    )
    source = tmp_path / "source"
    source.mkdir()
    for child in ROOT.iterdir():  # links, so that nothing is written into the repository
        if child.name in {
            "deeplink",
            "kvconnector",
            "router",
            "solver",
            "plugins",
            "pyproject.toml",
            "README.md",
            "LICENSE",
        }:
            (source / child.name).symlink_to(child)
    out = tmp_path / "out"
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program, str(out)], cwd=source, capture_output=True, text=True, timeout=55
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (metadata,) = out.rglob("METADATA")
    required = [
        line.partition(": ")[2] for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist")
    ]
    plain = _names([line for line in required if "extra ==" not in line])
    assert plain == _names(PROJECT["project"]["dependencies"])
    assert not plain & {"torch", "vllm"}
