"""`python -m deeplink.local.convert_gguf FILE.gguf FOLDER`: a GGUF Llama as a Hugging Face folder in bf16.

Runs in an engine environment: it needs torch, transformers, gguf and accelerate.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def convert(gguf: Path, folder: Path) -> None:
    quantised = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, low_cpu_mem_usage=True
    )
    # A model that was read from GGUF refuses to be saved, so its (now plain) weights move into a fresh one.
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    settings["dtype"] = "bfloat16"
    plain = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16)
    plain.load_state_dict({name: tensor.bfloat16() for name, tensor in quantised.state_dict().items()})
    plain.tie_weights()
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
