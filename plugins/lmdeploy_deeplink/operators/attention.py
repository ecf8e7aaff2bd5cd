"""Attention over sequences of unlike lengths, with and without a paged cache.

All compute ``softmax(scale * q k^T + bias) v`` (Vaswani et al., 2017). `softmax_scale` is ``1 / sqrt(D)`` when None.
With `alibi_slopes`, one per query head, the bias of a query at position p for a key at position j is
``slope * (j - p)`` (Press et al., 2022), else it is 0.

A cache is [blocks, block_size, Hkv, D] or [blocks, Hkv, block_size, D], as the vendor's `cache_axes` says. Row n of
`block_table` [N, blocks of the longest], int32, lists the blocks of sequence n in order; what lies behind its last
token, in the row and in the block, is not to be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class PrefillAttention(Protocol):
    """Attention of new tokens to each other: nothing is cached yet, and the caches are not looked at."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        q_start_loc: Tensor,
        q_seq_len: Tensor,
        kv_seq_len: Tensor,
        max_q_seq_len: int,
        num_q_heads: int,
        num_kv_heads: int,
        attn_mask: Sequence[Tensor | None],
        softmax_scale: float | None,
        alibi_slopes: Sequence[float] | None,
        attn_output: Tensor,
    ) -> Tensor:
        """`query` [T, Hq, D], `key` [T, Hkv, D], `value` [T, Hkv, Dv]; gives `attn_output` [T, Hq, Dv], filled.

        `q_seq_len` and `kv_seq_len` [N], equal. With `q_start_loc` [N + 1], the sums, attention is causal, and
        `attn_mask` holds one mask [max_q_seq_len, max_q_seq_len], True where a key is hidden, for vendors that want
        one. With `q_start_loc` [N], the starts, every token sees its whole sequence, and `attn_mask` is empty.
        `attn_output` may be the memory of `query`.
        """


class PagedPrefillAttention(Protocol):
    """Causal attention of new tokens to all of their sequence; the cache holds it already, the new tokens included."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        block_size: int,
        q_start_loc: Tensor,
        q_seq_len: Tensor,
        kv_seq_len: Tensor,
        cu_seq_lens_kv: Tensor,
        max_q_seq_len: int,
        max_kv_seq_len: int,
        num_q_heads: int,
        num_kv_heads: int,
        attn_mask: Sequence[Tensor | None],
        softmax_scale: float | None,
        alibi_slopes: Sequence[float] | None,
        attn_output: Tensor,
        kv_scales: Tensor | None,
        kv_zeros: Tensor | None,
        quant_bits: int,
    ) -> Tensor:
        """Gives `attn_output` [T, Hq, Dv], filled; it may be the memory of `query`.

        `query`, `key` and `value` as in `PrefillAttention`, of the last `q_seq_len[n]` of the `kv_seq_len[n]` tokens of
        sequence n. `q_start_loc` and `cu_seq_lens_kv` [N + 1] are the sums of both. `attn_mask` holds one mask [2048,
        2048], True above the diagonal, for vendors that want one. Caches in 8 bits are not specified here:
        `quant_bits` is 0, the scales and zeros are None.
        """


class PagedDecodeAttention(Protocol):
    """Attention of one new token of each sequence to all of it; the cache holds the new token already."""

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        block_size: int,
        q_seq_len: Tensor,
        kv_seq_len: Tensor,
        max_kv_seq_len: int,
        num_q_heads: int,
        num_kv_heads: int,
        softmax_scale: float | None,
        alibi_slopes: Sequence[float] | None,
        attn_output: Tensor,
        kv_scales: Tensor | None,
        kv_zeros: Tensor | None,
        quant_bits: int,
    ) -> Tensor:
        """`query` [N, Hq, D], `q_seq_len` [N] of ones; gives `attn_output` [N, Hq, Dv], filled. Else as in prefill."""


class IncreFlashAttention(Protocol):
    """Attention of one new token of each sequence to keys and values of equal length that lie in one piece."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        num_heads: int,
        input_layout: str,
        softmax_scale: float | None,
    ) -> Tensor:
        """Gives the shape of `query`. As many KV heads as query heads.

        With `input_layout` "BSH", `query` is [N, 1, Hq D] and the others [N, S, Hq D]; in "BSND" the last is two axes.
        """


class FusedAttention(Protocol):
    """Attention of one sequence that lies in one piece, for models that bring their own cache."""

    def __call__(
        self, query_states: Tensor, key_states: Tensor, value_states: Tensor, mask: Sequence[Tensor | None]
    ) -> Tensor:
        """`query_states` [1, Sq, Hq, D], the others [1, Skv, Hkv, D]; gives [Sq, Hq, D], scaled by 1 / sqrt(D).

        With Sq = Skv, `mask` holds one mask [Sq, Sq], True where a key is hidden. Else Sq is 1, and all is seen.
        """
