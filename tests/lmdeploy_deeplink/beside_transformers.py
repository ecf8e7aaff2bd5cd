"""A program for an engine's Python: how likely transformers finds tokens that an engine has chosen.

Reads [{"prompt": token ids, "tokens": those chosen, "logprobs": the engine's}] and prints for each, over its tokens:
{"engine": how far the engine's log-probabilities are from float32, "own": how far transformers' own in DTYPE are,
"regret": how much likelier float32's best token is than the chosen, "alike": how many transformers chooses in DTYPE}.
beside_transformers.py MODEL DTYPE < ANSWERS
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def main(folder: str, dtype: str) -> None:
    answers = json.load(sys.stdin)
    with torch.inference_mode():
        exact = [told(folder, torch.float32, answer) for answer in answers]
        same = [told(folder, getattr(torch, dtype), answer) for answer in answers]
    found = []
    for answer, wide, narrow in zip(answers, exact, same, strict=True):
        tokens = torch.tensor(answer["tokens"]).unsqueeze(-1)
        best, mine = wide.max(-1).values, wide.gather(-1, tokens).squeeze(-1)
        theirs = narrow.gather(-1, tokens).squeeze(-1)
        found.append(
            {
                "engine": float((torch.tensor(answer["logprobs"]) - mine).abs().max()),
                "own": float((theirs - mine).abs().max()),
                "regret": float((best - mine).max()),
                "alike": int((narrow.argmax(-1) == tokens.squeeze(-1)).sum()),
            }
        )
    json.dump(found, sys.stdout)


_models: dict[tuple[str, torch.dtype], Any] = {}


def told(folder: str, dtype: torch.dtype, answer: dict[str, Any]) -> torch.Tensor:
    """[tokens, vocabulary]: the log-probabilities of what follows the prompt, each token given those before it."""
    key = (folder, dtype)
    if key not in _models:
        _models[key] = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = torch.tensor([answer["prompt"] + answer["tokens"][:-1]])
    logits = _models[key](ids, logits_to_keep=len(answer["tokens"])).logits[0]
    return logits.double().log_softmax(-1)


if __name__ == "__main__":
    main(*sys.argv[1:])
