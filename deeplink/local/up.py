"""A placement on this machine: its engines and the router as processes, started together and ended together."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deeplink.errors import LocalError
from deeplink.local import engines, overlay, placed, trial
from deeplink.local.cache import Progress
from deeplink.local.placed import Machine
from deeplink.local.process import Process, wait_all_ready
from deeplink.local.trial import Checked
from deeplink.plugins import load_plugins
from deeplink.solver.emit import configs, nodes
from deeplink.solver.emit.members import Member, members
from deeplink.solver.placement import Placement

ENGINES_SECONDS = 1800.0
ROUTER_SECONDS = 60.0
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Options:
    """`port` is the router's, 0 for any. `model` is a folder instead of the placement's checkpoint. `folder` keeps
    configuration and logs; None makes one that is deleted unless something failed."""

    port: int = 0
    model: Path | None = None
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """`urls` are the engines' endpoints by name, `config` the router's deeplink.toml."""

    placement: Placement
    members: tuple[Member, ...]
    urls: Mapping[str, str]
    router_url: str
    config: Path
    processes: tuple[Process, ...]

    def require_alive(self) -> None:
        """Raises LocalError, with the end of its log, when one has ended."""
        for process in self.processes:
            process.is_ready()


@contextmanager
def running(placement: Placement, options: Options, progress: Progress) -> Iterator[Running]:
    """The whole placement, ready; every process of it is gone when the block is left."""
    if not placement.engines:
        raise LocalError("there is nothing to start: the placement has no engines", remedy="solve a fleet that has one")
    if options.port:
        engines.require_free(options.port)
    found = members(placement, load_plugins().chips.items)
    for member in found:
        nodes.require_one_host(member)
    if options.model is not None:
        placement = msgspec.structs.replace(placement, checkpoint=str(options.model.resolve()))
    # Before anything is started: this may take minutes the first time.
    kept = placed.environments(found, progress)
    packages = overlay.ensure(progress)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="deeplink-up-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with ExitStack() as ends:
            yield _start(
                placement, found, Machine(HOST, kept, packages, folder.resolve()), options.port, progress, ends
            )
    except BaseException as exc:
        # Ctrl-C and the end of a run are no failure.
        if isinstance(exc, Exception):
            progress(f"logs are kept in {folder}")
        elif options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)


def _start(
    placement: Placement,
    found: tuple[Member, ...],
    machine: Machine,
    router_port: int,
    progress: Progress,
    ends: ExitStack,
) -> Running:
    *ports, free = engines.free_ports(len(found) + 1)
    router_port, folder = router_port or free, machine.folder
    secret = _secret(folder / "secret")
    urls = {member.name: f"http://{HOST}:{port}" for member, port in zip(found, ports, strict=True)}
    config = folder / "deeplink.toml"
    config.write_text(configs.router(placement, found, urls, port=router_port, secret=str(secret)))
    started = []
    for member, port in zip(found, ports, strict=True):
        own = folder / f"{member.label}.toml"
        own.write_text(configs.engine(member, host=HOST, secret=str(secret)))
        started.append(placed.process(placement, member, machine, port, own))
    progress(f"starting {len(started)} engine{'s' if len(started) > 1 else ''}")
    for process in started:
        ends.enter_context(process)
    wait_all_ready(started, ENGINES_SECONDS)
    progress("starting the router")
    router = Process(
        "router",
        [sys.executable, "-m", "deeplink.cli", "router", "--config", config],
        env=os.environ | {"PYTHONPATH": str(machine.packages)},
        log=folder / "router.log",
        url=f"http://{HOST}:{router_port}",
        cwd=folder,
    )
    ends.enter_context(router)
    wait_all_ready([router], ROUTER_SECONDS)
    return Running(placement, found, urls, router.url, config, (*started, router))


def _secret(path: Path) -> Path:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    return path


def check(running_: Running, most: int) -> list[Checked]:
    """A request of each bucket's length, with `most` tokens at most."""
    return trial.check(running_.router_url, running_.placement, running_.members, most)


def as_json(running_: Running, checked: Sequence[Checked]) -> str:
    """One line."""
    value = {
        "router": running_.router_url,
        "engines": running_.urls,
        "requests": [msgspec.to_builtins(one) for one in checked],
    }
    return json.dumps(value)
