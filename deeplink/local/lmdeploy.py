"""LMDeploy on CPU as a process: its command line and environment, with and without deeplink.

It is `deeplink serve lmdeploy`, with deeplink's reference operators on a machine without a device.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deeplink.errors import LocalError
from deeplink.local import step
from deeplink.local.engines import Engine
from deeplink.local.environment import Environment
from deeplink.local.process import Process

ROLES = {"prefill": "Prefill", "decode": "Decode"}
CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"


def process(engine: Engine, environment: Environment, overlay: Path, folder: Path) -> Process:
    """The engine's process, not started; its log is `folder/NAME.log`, and beside it lies its view of the model. It is
    not pinned to `engine.core`. Raises LocalError for a model whose config LMDeploy does not understand."""
    return Process(
        engine.name,
        [environment.python, *arguments(engine, readable(engine.model, folder / f"{engine.name}-model"))],
        env=step.clean_environ() | variables(engine, overlay),
        log=folder / f"{engine.name}.log",
        url=engine.url,
        cwd=folder,  # not a checkout, whose folders would be taken for packages
    )


def arguments(engine: Engine, model: Path) -> list[str]:
    length = str(engine.max_model_len)
    words = ["-m", "deeplink.cli", "serve", "lmdeploy", str(model), "--model-name", engine.served_name]
    words += ["--server-name", "127.0.0.1", "--server-port", str(engine.port), "--dtype", engine.dtype]
    # A prefill engine takes no prompt that it would have to compute in pieces.
    words += ["--session-len", length, "--max-prefill-token-num", length]
    words += ["--max-batch-size", str(engine.max_num_seqs), "--cache-block-seq-len", str(engine.block_size)]
    words += ["--num-gpu-blocks", str(engine.max_model_len * engine.max_num_seqs // engine.block_size)]
    words += ["--logprobs-mode", "raw_logprobs", "--eager-mode", "--disable-metrics"]
    if engine.role:
        words += ["--role", ROLES[engine.role], "--migration-backend", "deeplink"]
    return [*words, *engine.flags]


def variables(engine: Engine, overlay: Path) -> dict[str, str]:
    return {
        **on_processor(overlay),
        "OMP_NUM_THREADS": "1",
        **({} if engine.config is None else {"DEEPLINK_CONFIG": str(engine.config)}),
        **engine.env,
    }


def on_processor(overlay: Path) -> dict[str, str]:
    """What LMDeploy needs in its environment to run here."""
    return {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(overlay)}


def readable(model: Path, target: Path) -> Path:
    """The model as LMDeploy's transformers 4 reads it: `model` itself, or links to its files in `target`, where a newer
    transformers has written its configuration. Raises LocalError for position encodings that differ by layer."""
    written = {name: json.loads((model / name).read_text()) for name in (CONFIG, TOKENIZER) if (model / name).exists()}
    changed = {name: new for name, old in written.items() if (new := _of_four(old)) != old}
    if not changed:
        return model
    target.mkdir(exist_ok=True)
    for file in model.iterdir():
        place = target / file.name
        place.unlink(missing_ok=True)
        if file.name in changed:
            place.write_text(json.dumps(changed[file.name]))
        else:
            place.symlink_to(file.resolve())
    return target


def _of_four(settings: dict[str, Any]) -> dict[str, Any]:
    """With the names that transformers 4 has for the position encoding and for the kind of tokenizer."""
    settings = dict(settings)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(rope := settings.pop("rope_parameters", None), dict):
        if "rope_theta" not in rope:
            raise LocalError(
                "LMDeploy's transformers knows no position encodings that differ by layer, as this model has",
                remedy="name another model with --model",
            )
        settings["rope_theta"] = rope["rope_theta"]
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        settings["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    return settings
