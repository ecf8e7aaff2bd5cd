"""SGLang on CPU as a process that the fleet starts, watches and ends."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from fleet import SERVED, Fleet, Running

from deeplink.local import engines, environment, step
from deeplink.local.engines import Engine
from deeplink.local.environment import Environment
from deeplink.local.process import Process

SHIMS = Path(__file__).with_name("sglang_cpu")
MODELS = ("llama", "registry", "utils", "__init__")
"""SGLang imports every model it knows when it starts, unless told not to."""


@cache
def installed() -> Environment:
    return environment.ensure(environment.SGLANG_CPU, print)


def prepare(fleet: Fleet, name: str, role: str, *, page: int, **settings: Any) -> Running:
    """An engine, not started; without a `role` it serves alone, as SGLang does without disaggregation."""
    api, port = engines.free_ports(2)
    values: dict[str, Any] = {"model": fleet.model, "config": fleet.config, "served_name": SERVED, **settings}
    engine = Engine(name=name, role=role, port=api, block_size=page, **values)
    return Running(engine, _process(fleet, engine, port), installed())


def bootstrap(running: Running) -> int:
    """The port at which SGLang's decode engines look for a prefill engine."""
    words = running.process.argv
    return int(words[words.index("--disaggregation-bootstrap-port") + 1])


def _process(fleet: Fleet, engine: Engine, port: int) -> Process:
    return Process(
        engine.name,
        [installed().python, "-m", "sglang.launch_server", *_arguments(engine, port)],
        env=step.clean_environ() | _variables(fleet, engine),
        log=fleet.folder / f"{engine.name}.log",
        url=engine.url,
        cwd=fleet.folder,  # not a checkout, whose folders would be taken for packages
    )


def _arguments(engine: Engine, port: int) -> list[str]:
    words = ["--model-path", str(engine.model), "--served-model-name", engine.served_name]
    words += ["--host", "127.0.0.1", "--port", str(engine.port), "--device", "cpu"]
    words += ["--attention-backend", "torch_native", "--dtype", engine.dtype, "--page-size", str(engine.block_size)]
    words += ["--max-total-tokens", "4096", "--max-running-requests", "8", "--mem-fraction-static", "0.3"]
    # Else its loop keeps a core busy when there is nothing to do.
    words += ["--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle", "--log-level", "warning"]
    words += ["--disaggregation-bootstrap-port", str(port)]
    if engine.role:
        words += ["--disaggregation-mode", engine.role, "--disaggregation-transfer-backend", "deeplink"]
    if engine.role == "decode":
        # The other way to keep a request that has to make room needs CUDA's pinned memory.
        words += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
    return [*words, *engine.flags]


def _variables(fleet: Fleet, engine: Engine) -> dict[str, str]:
    models = next(installed().folder.glob("lib/python*/site-packages/sglang/srt/models"))
    others = sorted(path.stem for path in models.glob("*.py") if path.stem not in MODELS)
    return {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "HOST_IP": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(others),
        "SGLANG_HOST_IP": "127.0.0.1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": f"{fleet.overlay}:{SHIMS}",
        "DEEPLINK_CONFIG": str(engine.config),
        **engine.env,
    }
