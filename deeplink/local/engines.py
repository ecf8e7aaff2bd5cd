"""vLLM on CPU as a process: its command line and environment, with and without deeplink."""

from __future__ import annotations

import os
import random
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deeplink.config import CONTROL_OFFSET, control_port
from deeplink.errors import LocalError
from deeplink.local import step
from deeplink.local.environment import Environment
from deeplink.local.process import Process

_LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
REMEMBERED = 1000

# Eager mode, so nothing here compiles; the rest keeps an engine from looking outside.
QUIET = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One vLLM engine to start.

    `role` is prefill, decode or both; empty starts vLLM without deeplink. `config` is the deeplink.toml.
    `core` pins the arithmetic to one core, None leaves it to the kernel. `kv_mib` is the size of its KV
    cache: by default what four sequences of 1024 tokens of the demo's model need, and some more. `flags` and `env`
    come last and so override.
    """

    name: str
    role: str
    port: int
    model: Path
    config: Path | None = None
    served_name: str = "demo"
    dtype: str = "float32"
    block_size: int = 128
    core: int | None = None
    kv_mib: int = 256
    max_model_len: int = 1024
    max_num_seqs: int = 4
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def control(self) -> str:
        return f"http://127.0.0.1:{control_port(self.port)}"


def process(engine: Engine, environment: Environment, overlay: Path, folder: Path) -> Process:
    """The engine's process, not started; its log is `folder/NAME.log`."""
    return Process(
        engine.name,
        [environment.folder / "bin" / "vllm", *arguments(engine)],
        env=step.clean_environ() | variables(engine, overlay),
        log=folder / f"{engine.name}.log",
        url=engine.url,
        cwd=folder,
    )


def arguments(engine: Engine) -> list[str]:
    words = ["serve", str(engine.model), "--served-model-name", engine.served_name]
    words += ["--host", "127.0.0.1", "--port", str(engine.port)]
    words += ["--dtype", engine.dtype, "--block-size", str(engine.block_size), "--enforce-eager"]
    words += ["--max-model-len", str(engine.max_model_len), "--max-num-seqs", str(engine.max_num_seqs)]
    # Explicit, so that vLLM skips its warm-up. Not VLLM_CPU_KVCACHE_SPACE: whole GiB, and it beats this flag.
    words += ["--kv-cache-memory-bytes", str(engine.kv_mib << 20)]
    if engine.role:
        words += ["--platform", "deeplink", "--deeplink-role", engine.role]
        if engine.config is not None:
            words += ["--deeplink-config", str(engine.config)]
    return [*words, *engine.flags]


def variables(engine: Engine, overlay: Path) -> dict[str, str]:
    threads = (
        {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        if engine.core is None
        else {"VLLM_CPU_OMP_THREADS_BIND": str(engine.core)}
    )
    return {
        **QUIET,
        **threads,
        "PYTHONPATH": str(overlay),
        **engine.env,
    }


def cores(count: int) -> list[int | None]:
    """A core for each of `count` engines, or None for all where this process may not use that many."""
    usable = sorted(os.sched_getaffinity(0))
    return list(usable[:count]) if len(usable) >= count else [None] * count


_given: deque[int] = deque(maxlen=REMEMBERED)


def free_ports(count: int) -> list[int]:
    """Ports that are free now, each with its control port.

    They lie below those the kernel hands out by itself: an engine takes half a minute to bind its port, and by then any
    connection of this machine may have been given one of the others. For the same reason none is given twice by this
    process, as a port or as the control port of another, before REMEMBERED others have been.
    """
    lowest = int(_LOCAL_PORTS.read_text().split()[0]) if _LOCAL_PORTS.exists() else 32768
    candidates = range(10000, max(lowest - CONTROL_OFFSET, 12000))
    held: list[socket.socket] = []
    found: list[int] = []
    try:
        for port in random.SystemRandom().sample(candidates, min(len(candidates), 50 * count)):
            if len(found) == count:
                break
            if port in _given or control_port(port) in _given:
                continue
            pair = [sock for sock in (_bind(port), _bind(control_port(port))) if sock is not None]
            held += pair
            if len(pair) == 2:
                found.append(port)
                _given.extend((port, control_port(port)))
    finally:
        for sock in held:
            sock.close()
    if len(found) < count:
        raise LocalError(f"no {count} free ports with free control ports on 127.0.0.1")
    return found


def require_free(port: int) -> None:
    """Raises LocalError when something listens on `port` of 127.0.0.1."""
    sock = _bind(port)
    if sock is None:
        raise LocalError(f"port {port} of 127.0.0.1 is in use", remedy="name another one with --port")
    sock.close()


def _bind(port: int) -> socket.socket | None:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError:
        return None
