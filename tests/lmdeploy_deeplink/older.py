"""A checkpoint that transformers 5 has saved, as transformers 4 reads it, which LMDeploy 0.18 needs."""

from __future__ import annotations

import json
from pathlib import Path


def older(model: Path, target: Path) -> Path:
    """The same weights, linked, with a config and a tokenizer of the older form."""
    target.mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix != ".json" or file.name in ("tokenizer.json", "generation_config.json"):
            (target / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    rope = config.pop("rope_parameters", None) or {}
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
    config["torch_dtype"] = config.pop("dtype", "bfloat16")
    (target / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    (target / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return target
