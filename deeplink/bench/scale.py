"""How much is measured: how often, and on how large a cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """`tokens` of 64 KiB each, 16 layers of 8 heads x 128 in 16 bits; `link_tokens` over emulated links."""

    rounds: int = 3
    tokens: int = 2048
    link_tokens: int = 2048


QUICK = Scale(rounds=1, tokens=256, link_tokens=256)
