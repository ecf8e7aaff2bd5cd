"""Mixtures of experts: who computes a token, and the computation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class MoeGatingTopkSoftmax(Protocol):
    """The largest of the routing probabilities, and whose they are."""

    def __call__(self, router_logits: Tensor, topk: int, moe_metadata: object | None) -> tuple[Tensor, Tensor]:
        """`router_logits` [T, E]; gives (softmax(logits) [T, topk], largest first, the experts [T, topk], integers).

        The softmax is over all E, and the chosen ones are not made to sum to 1. Among equals, any. `moe_metadata` is
        None on one device; what it holds on several is the vendor's business, and not specified here.
        """


class FusedMoe(Protocol):
    """``sum_k w_k down[e_k] (silu(gate[e_k] x) * up[e_k] x)`` over the experts of each token."""

    def __call__(
        self,
        hidden_states: Tensor,
        gate_up_weights: Tensor,
        down_weights: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        topk: int,
        renormalize: bool,
        moe_metadata: object | None,
    ) -> Tensor:
        """Gives [T, H]. May overwrite `hidden_states`.

        `hidden_states` [T, H], `gate_up_weights` [E, 2 I, H] with gate in the first half, `down_weights` [E, H, I],
        `topk_weights` and `topk_ids` [T, topk]. With `renormalize` the weights of a token are divided by their sum.
        """
