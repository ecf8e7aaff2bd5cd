"""SGLang on CPU as a process: its command line and environment, with and without deeplink.

SGLang publishes no kernels for CPU. What stands in for them is in `sglang_cpu`, on the path of these processes alone.
"""

from __future__ import annotations

from pathlib import Path

from deeplink.local import step
from deeplink.local.engines import Engine
from deeplink.local.environment import Environment
from deeplink.local.process import Process

SHIMS = Path(__file__).with_name("sglang_cpu")
MODELS = ("llama", "registry", "utils", "__init__")
"""SGLang imports every model it knows when it starts, unless told not to."""


def process(engine: Engine, environment: Environment, overlay: Path, folder: Path) -> Process:
    """The engine's process, not started; its log is `folder/NAME.log`. Its page size is `engine.block_size`, and it is
    not pinned to `engine.core`."""
    return Process(
        engine.name,
        [environment.python, "-m", "sglang.launch_server", *arguments(engine)],
        env=step.clean_environ() | variables(engine, environment, overlay),
        log=folder / f"{engine.name}.log",
        url=engine.url,
        cwd=folder,  # not a checkout, whose folders would be taken for packages
    )


def arguments(engine: Engine) -> list[str]:
    words = ["--model-path", str(engine.model), "--served-model-name", engine.served_name]
    words += ["--host", "127.0.0.1", "--port", str(engine.port), "--device", "cpu"]
    words += ["--attention-backend", "torch_native", "--dtype", engine.dtype, "--page-size", str(engine.block_size)]
    words += ["--max-total-tokens", str(engine.max_model_len * engine.max_num_seqs)]
    words += ["--max-running-requests", str(engine.max_num_seqs), "--mem-fraction-static", "0.3"]
    # Else its loop keeps a core busy when there is nothing to do.
    words += ["--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle", "--log-level", "warning"]
    if engine.role:
        words += ["--disaggregation-mode", engine.role, "--disaggregation-transfer-backend", "deeplink"]
    if engine.role == "decode":
        # The other way to keep a request that has to make room needs CUDA's pinned memory.
        words += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
    return [*words, *engine.flags]


def variables(engine: Engine, environment: Environment, overlay: Path) -> dict[str, str]:
    models = next(environment.folder.glob("lib/python*/site-packages/sglang/srt/models"))
    others = sorted(path.stem for path in models.glob("*.py") if path.stem not in MODELS)
    return {
        **on_processor(overlay),
        "OMP_NUM_THREADS": "1",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(others),
        **({} if engine.config is None else {"DEEPLINK_CONFIG": str(engine.config)}),
        **engine.env,
    }


def on_processor(overlay: Path) -> dict[str, str]:
    """What SGLang needs in its environment to run here, whatever its model."""
    return {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "HOST_IP": "127.0.0.1",
        "SGLANG_HOST_IP": "127.0.0.1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": f"{overlay}:{SHIMS}",
    }
