"""The gated activation and rotary embeddings, computed in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deeplink.errors import UnsupportedOperator

if TYPE_CHECKING:
    from torch import Tensor


def silu_and_mul(input_tensor: Tensor, dim: int) -> Tensor:
    gate, up = input_tensor.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(input_tensor.dtype)


def apply_rotary_pos_emb(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    size = cos.shape[-1]
    if size > query.shape[-1] or size % 2:
        raise UnsupportedOperator(
            f"angles for {size} elements do not pair those of heads of {query.shape[-1]}",
            field="apply_rotary_pos_emb.cos",
            theirs=str(size),
        )
    # One head axis, so that a token's angles are those of all its heads.
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    return _turned(query, cos, sin, size), _turned(key, cos, sin, size)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor, size: int) -> Tensor:
    turning, staying = heads[..., :size].float(), heads[..., size:]
    low, high = turning.chunk(2, -1)
    turned = turning * cos + torch.cat((-high, low), -1) * sin
    return torch.cat((turned.to(heads.dtype), staying), -1)
