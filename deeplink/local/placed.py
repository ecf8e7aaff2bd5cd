"""One engine of a placement as a process of this machine.

Engines on processors run in environments that are made on the first run, one for each kind; those on other chips run
what is installed here, which their vendor brought.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deeplink.errors import LocalError
from deeplink.local import engines, environment, lmdeploy, sglang, step
from deeplink.local.cache import Progress
from deeplink.local.environment import Environment
from deeplink.local.kinds import KINDS
from deeplink.local.process import Process
from deeplink.solver.emit.commands import command
from deeplink.solver.emit.local import PYTHONS
from deeplink.solver.emit.members import Member
from deeplink.solver.kinds import Kind
from deeplink.solver.placement import Placement

_MODULES: Mapping[Kind, str] = {"sglang": "sglang", "lmdeploy": "lmdeploy"}


@dataclass(frozen=True, slots=True)
class Machine:
    """What the engines of a placement are started with: where they listen, the environments of kinds on processors, the
    overlay, and the folder of logs and configuration."""

    host: str
    kept: Mapping[Kind, Environment]
    packages: Path
    folder: Path


def environments(members: Iterable[Member], progress: Progress) -> dict[Kind, Environment]:
    """One for each kind that runs on processors; minutes the first time."""
    wanted = sorted({member.engine.kind for member in members if member.processor})
    return {kind: environment.ensure(KINDS[kind].lock(""), progress) for kind in wanted}


def process(placement: Placement, member: Member, machine: Machine, port: int, config: Path) -> Process:
    """Not started. Raises LocalError where the engine is not installed."""
    kind, kept = member.engine.kind, machine.kept.get(member.engine.kind) if member.processor else None
    if kept is not None and kind == "lmdeploy":
        placement = _readable(placement, machine.folder / f"{member.label}-model")
    started = command(placement, member, host=machine.host, port=port, config=str(config))
    if kept is not None:
        executable = kept.folder / "bin" / started.words[0]
        env = step.clean_environ() | _on_processor(kind, kept, machine.packages)
    else:
        executable = _python(kind, member) if kind in PYTHONS else _installed(started.words[0], member)
        env = dict(os.environ)
    return Process(
        member.label,
        [executable, *started.words[1:]],
        env=env | dict(started.variables),
        log=machine.folder / f"{member.label}.log",
        url=f"http://{machine.host}:{port}",
        cwd=machine.folder,
    )


def _on_processor(kind: Kind, kept: Environment, packages: Path) -> dict[str, str]:
    if kind == "sglang":
        return sglang.on_processor(packages)
    if kind == "lmdeploy":
        return lmdeploy.on_processor(packages)
    return engines.QUIET | {"PYTHONPATH": str(packages)}


def _readable(placement: Placement, target: Path) -> Placement:
    """With the checkpoint as the LMDeploy that is kept reads it, where it is a folder of this machine."""
    checkpoint = Path(placement.checkpoint or placement.model)
    if not checkpoint.is_dir():
        return placement
    return msgspec.structs.replace(placement, checkpoint=str(lmdeploy.readable(checkpoint.resolve(), target)))


def _python(kind: Kind, member: Member) -> Path:
    """The one that the kind's variable names, else this one, if it has the engine."""
    if named := os.environ.get(PYTHONS[kind]):
        return Path(named)
    if importlib.util.find_spec(_MODULES[kind]) is None:
        raise _missing(member.title, member, f"name the Python that has it with {PYTHONS[kind]}")
    return Path(sys.executable)


def _installed(name: str, member: Member) -> Path:
    beside = Path(sys.executable).with_name(name)
    if beside.exists():
        return beside
    if found := shutil.which(name):
        return Path(found)
    raise _missing(name, member, "run this in the environment that has it")


def _missing(name: str, member: Member, remedy: str) -> LocalError:
    how = member.served.had if member.served else "its vendor's images"
    return LocalError(
        f"no {name} is installed here, which {member.name} on {member.engine.chip} needs",
        remedy=f"{remedy} ({how}), or write containers with deeplink emit",
    )
