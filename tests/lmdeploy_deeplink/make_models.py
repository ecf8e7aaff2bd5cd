"""A program for LMDeploy's Python: write a tiny model with random weights, of SEED, and a tokenizer of as many words.

make_models.py TARGET SEED
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 1000


def main(target: str, seed: str) -> None:
    torch.manual_seed(int(seed))
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        # Larger than by default: attention must matter for the next token, or no test would see a wrong cache.
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w2", unk_token="w0")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}w9"
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
