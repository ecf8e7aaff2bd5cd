"""A program for the engines' environment: write a tiny model with random weights, and the tokenizer of another.

make_tiny.py TARGET TOKENIZER_FROM CONFIG_JSON
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path


def main(target: str, tokenizer: str, config: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = json.loads(config)
    torch.manual_seed(values.pop("seed", 0))
    made = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Larger than by default: attention must matter for the next token, or no test would see a wrong cache.
            if weight.dim() == 2 and "embed" not in name:
                weight.mul_(3.0)
    model.save_pretrained(target)
    for file in Path(tokenizer).glob("*"):
        if "token" in file.name or file.name in ("merges.txt", "vocab.json", "chat_template.jinja"):
            shutil.copy(file, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
