"""`python -m deeplink.local.disturb_weights MODEL FOLDER SEED`: a model with weights one per cent off.

Two such checkpoints agree in every field of their config, which is what a weights fingerprint is for.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def disturb(source: Path, folder: Path, seed: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(weight.float() * (1 + 0.01 * noise))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


if __name__ == "__main__":
    disturb(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
