"""Two unlike engines and a router on this machine: everything they need, their start and their end."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from deeplink import secret
from deeplink.errors import LocalError
from deeplink.local import engines, environment, model, overlay
from deeplink.local.cache import Progress
from deeplink.local.engines import Engine
from deeplink.local.kinds import KINDS, Kind
from deeplink.local.measure import Stack
from deeplink.local.process import Process, wait_all_ready

ENGINES_SECONDS = 600.0
ROUTER_SECONDS = 60.0

Side = tuple[Kind, environment.Environment]


@dataclass(frozen=True, slots=True)
class Options:
    """`port` is the router's, 0 for any. In float32 the comparison of tokens is sound on every machine; in
    bf16 a nearly tied choice between two tokens can fall either way when an engine computes in another order.
    `prefill` and `decode` are kinds of engines, of `KINDS`, with their versions; an empty one is the default.
    """

    port: int = 0
    dtype: str = "float32"
    prefill_block: int = 64
    decode_block: int = 128
    prefill: str = "vllm"
    decode: str = "vllm"
    prefill_version: str = ""
    decode_version: str = ""
    model: Path | None = None


@dataclass(frozen=True, slots=True)
class Running:
    stack: Stack
    processes: tuple[Process, ...]

    def require_alive(self) -> None:
        """Raises LocalError, with the end of its log, when one has ended."""
        for process in self.processes:
            process.is_ready()


@contextmanager
def running(options: Options, progress: Progress) -> Iterator[Running]:
    """The whole stack, ready; every process of it is gone when the block is left.

    Logs are kept only after a failure, and `progress` then says where.
    """
    if options.port:
        engines.require_free(options.port)
    named = ((options.prefill, options.prefill_version), (options.decode, options.decode_version))
    sides = [_side(KINDS[kind], version, progress) for kind, version in named]
    packages = overlay.ensure(progress)
    weights = options.model or model.smollm2(sides[1][1], packages, progress)
    folder = Path(tempfile.mkdtemp(prefix="deeplink-demo-"))
    try:
        with ExitStack() as ends:
            yield _start(options, sides, packages, weights.resolve(), folder, progress, ends)
    except BaseException as exc:
        # Ctrl-C and the end of a run are no failure.
        if isinstance(exc, Exception):
            progress(f"logs are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _side(kind: Kind, version: str, progress: Progress) -> Side:
    return kind, environment.ensure(kind.lock(version), progress)


def _start(
    options: Options,
    sides: Sequence[Side],
    packages: Path,
    weights: Path,
    folder: Path,
    progress: Progress,
    ends: ExitStack,
) -> Running:
    *ports, free = engines.free_ports(4)
    router_port = options.port or free
    cores = engines.cores(2)
    config = folder / "deeplink.toml"

    def engine(name: str, side: int, role: str, port: int) -> Engine:
        return Engine(
            name=name,
            role=role,
            port=port,
            model=weights,
            config=config,
            dtype=options.dtype,
            block_size=(options.prefill_block, options.decode_block)[side],
            core=cores[side],
        )

    prefill, decode = (engine(role, side, role, ports[side]) for side, role in enumerate(("prefill", "decode")))
    started = [(prefill, *sides[0]), (decode, *sides[1])]
    alone = decode
    if not sides[1][0].alone:
        alone = engine("alone", 1, "", ports[2])
        started.append((alone, *sides[1]))
    token = _write_config(config, router_port, (prefill, decode))
    # Side by side: most of the start is importing, on one core each.
    progress(f"starting {len(started)} engines (about half a minute on as many idle cores)")
    running = [ends.enter_context(kind.process(one, env, packages, folder)) for one, kind, env in started]
    wait_all_ready(running, ENGINES_SECONDS)
    progress("starting the router")
    router = ends.enter_context(_router(config, router_port, packages, folder))
    wait_all_ready([router], ROUTER_SECONDS)
    return Running(Stack(prefill, decode, alone, sides[1][0], router.url, token), (*running, router))


def _router(config: Path, port: int, packages: Path, folder: Path) -> Process:
    return Process(
        "router",
        [sys.executable, "-m", "deeplink.cli", "router", "--config", config],
        env=os.environ | {"PYTHONPATH": str(packages)},
        log=folder / "router.log",
        url=f"http://127.0.0.1:{port}",
        cwd=folder,
    )


def _write_config(path: Path, router_port: int, pair: tuple[Engine, ...]) -> str:
    """deeplink.toml with a secret of this run alone; returns the token of the control endpoints."""
    secret_file = path.with_name("secret")
    descriptor = os.open(secret_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    lines = [f"secret_file = {json.dumps(str(secret_file))}", "[router]", f"port = {router_port}"]
    for engine in pair:
        lines += ["[[engines]]", f"name = {json.dumps(engine.name)}"]
        lines += [f"url = {json.dumps(engine.url)}", f"control = {json.dumps(engine.control)}"]
    path.write_text("\n".join(lines) + "\n")
    return secret.control_token(secret.load(secret_file))


def require_model(folder: Path) -> Path:
    """Raises LocalError unless `folder` looks like a Hugging Face model."""
    if not (folder / "config.json").is_file():
        raise LocalError(f"{folder} holds no config.json", remedy="--model takes a Hugging Face model folder")
    return folder
