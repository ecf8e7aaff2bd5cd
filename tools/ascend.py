"""What a release of vllm-ascend asks for and offers, read from its wheel; nothing of it is installed or imported.

ascend.py describe VERSION > tests/vllm_deeplink/data/vllm-ascend-VERSION.json
ascend.py resolve VERSION [NAME==VERSION ...]    whether deeplink[ascend] resolves beside its pins, with these instead

vLLM on Ascend is mostly on aarch64, and torch-npu's wheels for x86_64 want a torch that the package index does not
have, so what is resolved is an aarch64 host.
"""

from __future__ import annotations

import ast
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from configparser import ConfigParser
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PLATFORM, PYTHON = "aarch64-manylinux_2_31", "3.11"
LIBC = range(17, 40)
SECONDS = 300


def describe(version: str) -> dict[str, Any]:
    """The platform class that its plugin offers, with the signature of every method of it, and what it pins."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--python-version", PYTHON, "--dest", folder]
        command += [word for libc in LIBC for word in ("--platform", f"manylinux_2_{libc}_x86_64")]
        subprocess.run([*command, f"vllm-ascend=={version}"], check=True, timeout=SECONDS, stderr=subprocess.DEVNULL)
        (wheel,) = Path(folder).glob("*.whl")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        with zipfile.ZipFile(wheel) as archive:
            return {"wheel": wheel.name, "sha256": digest, **_read(archive)}


def _read(archive: zipfile.ZipFile) -> dict[str, Any]:
    points = ConfigParser(delimiters=("=",))
    points.optionxform = str  # type: ignore[assignment, method-assign]
    points.read_string(_text(archive, "/entry_points.txt"))
    groups = {group: dict(points[group]) for group in points.sections() if group.startswith("vllm.")}
    (plugin,) = groups["vllm.platform_plugins"].values()
    package, _, function = plugin.partition(":")
    offered = _returned(ast.parse(_text(archive, f"{package}/__init__.py")), function)
    module, _, name = offered.rpartition(".")
    methods = _methods(ast.parse(_text(archive, f"{module.replace('.', '/')}.py")), name)
    metadata = _text(archive, ".dist-info/METADATA").splitlines()
    needs = [line.partition(": ")[2] for line in metadata if line.startswith("Requires-Dist: ")]
    return {"entry_points": groups, "platform": offered, "methods": methods, "requires": needs}


def _text(archive: zipfile.ZipFile, name: str) -> str:
    (found,) = (one for one in archive.namelist() if one == name or (name[0] in "/." and one.endswith(name)))
    return archive.read(found).decode()


def _returned(module: ast.Module, function: str) -> str:
    """The text that the plugin's function returns: there is one, whatever the host."""
    (found,) = (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == function)
    (returned,) = (node.value for node in ast.walk(found) if isinstance(node, ast.Return))
    text = ast.literal_eval(returned) if returned is not None else None
    assert isinstance(text, str), ast.dump(found)
    return text


def _methods(module: ast.Module, name: str) -> dict[str, str]:
    (found,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)
    public = (node for node in found.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"))
    return {node.name: _signature(node) for node in public}


def _signature(node: ast.FunctionDef) -> str:
    decorators = "".join(f"@{ast.unparse(one)} " for one in node.decorator_list)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"{decorators}({ast.unparse(node.args)}){returns}"


def resolve(version: str, instead: list[str]) -> dict[str, str]:
    """What would be installed by a plain deeplink with the extra `ascend` and vllm-ascend: versions by name.

    `instead` are pins that take the place of vllm-ascend's own. Raises CalledProcessError, with what the resolver says
    in its output, when it does not resolve.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["ascend"], f"vllm-ascend=={version}"]
    with tempfile.TemporaryDirectory() as folder:
        override = Path(folder) / "override.txt"
        override.write_text("\n".join(instead))
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header"]
        command += ["--python-platform", PLATFORM, "--python-version", PYTHON, "--override", str(override), "-"]
        done = subprocess.run(
            command, input="\n".join(wanted), capture_output=True, text=True, check=True, timeout=SECONDS, cwd=folder
        )
    pinned = (line.split(" ")[0].partition("==") for line in done.stdout.splitlines())
    return {name: found for name, _, found in pinned if found}


def main(command: str, version: str, *instead: str) -> None:
    result = describe(version) if command == "describe" else resolve(version, list(instead))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main(*sys.argv[1:])
