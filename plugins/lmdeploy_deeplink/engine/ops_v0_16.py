"""What LMDeploy 0.16 and 0.17 ask a backend for, by kinds of layers, answered with layers out of a vendor's operators.

There a backend gives a builder for a kind of layer, which is then called with what 0.18 puts into a spec.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from lmdeploy.pytorch.backends import OpType
from lmdeploy.pytorch.backends.default import DefaultOpsBackend

from lmdeploy_deeplink.engine import layers
from lmdeploy_deeplink.operators.vendor import Vendor


class PagedAttention(SimpleNamespace):
    """Its name is told where what is asked for is refused; so are those of the next two."""


class SoftmaxTopK(SimpleNamespace):
    pass


class FusedMoE(SimpleNamespace):
    pass


def backend(vendor: Vendor, collective: str) -> type[DefaultOpsBackend]:
    """A class of LMDeploy's kind for this vendor. What a vendor has no operator for is LMDeploy's own torch code.

    `collective` is torch.distributed's name for what sums over processes.
    """

    def attention(
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        v_head_size: int | None = None,
        alibi: bool = False,
        sliding_window: Any = None,
        logit_softcapping: float | None = 0.0,
        causal: bool = True,
        use_flash_mla: bool = False,
        learnable_sink: bool = False,
        block_sparse_size: int = 1,
        **_: Any,
    ) -> layers.Attention:
        spec = PagedAttention(
            num_heads=num_heads,
            head_dim=head_size,
            scale=scale,
            num_kv_heads=num_kv_heads,
            v_head_dim=v_head_size,
            alibi=alibi,
            sliding_window=sliding_window,
            logit_softcapping=logit_softcapping,
            causal=causal,
            use_flash_mla=use_flash_mla,
            mla_index_topk=None,
            learnable_sink=learnable_sink,
            block_sparse_size=block_sparse_size,
        )
        return layers.Attention(vendor, spec)

    def norm(hidden_size: int, eps: float = 1e-6) -> layers.RMSNorm:
        return layers.RMSNorm(vendor, SimpleNamespace(eps=eps))

    def topk(top_k: int, dim: int = -1, n_groups: int = -1) -> layers.SoftmaxTopK:
        return layers.SoftmaxTopK(vendor, SoftmaxTopK(top_k=top_k, dim=dim, n_groups=n_groups))

    def experts(top_k: int, num_experts: int, renormalize: bool = False, ep_size: int = 1, **_: Any) -> layers.FusedMoE:
        return layers.FusedMoE(vendor, FusedMoE(top_k=top_k, renormalize=renormalize, ep_size=ep_size))

    builders: dict[OpType, Callable[..., Any]] = {
        OpType.PagedAttention: attention,
        OpType.RMSNorm: norm,
        OpType.SiluAndMul: lambda inplace=False: layers.SiluAndMul(vendor),
        OpType.ApplyRotaryEmb: lambda: layers.ApplyRotaryEmb(vendor),
        OpType.Linear: lambda *_, **__: layers.Linear(vendor),
        OpType.SoftmaxTopK: topk,
        OpType.FusedMoE: experts,
    }

    class VendorOpsBackend(layers.Answers, DefaultOpsBackend):
        vendor_name, sums_by = vendor.name, collective

        @classmethod
        def get_layer_impl_builder(cls, layer_type: OpType) -> Any:
            build = builders.get(layer_type)
            if build is None:
                return super().get_layer_impl_builder(layer_type)
            return SimpleNamespace(build=build)

    return VendorOpsBackend
