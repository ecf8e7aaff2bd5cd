"""What LMDeploy 0.18 asks a backend's `build_op` for, answered with layers out of a vendor's operators."""

from __future__ import annotations

from typing import Any

from lmdeploy.pytorch.backends.activation import SiluAndMulBuildSpec
from lmdeploy.pytorch.backends.apply_rotary_emb import ApplyRotaryEmbBuildSpec
from lmdeploy.pytorch.backends.attention import PagedAttentionBuildSpec
from lmdeploy.pytorch.backends.default import DefaultOpsBackend
from lmdeploy.pytorch.backends.linear import LinearBuildSpec
from lmdeploy.pytorch.backends.moe import FusedMoEBuildSpec, SoftmaxTopKBuildSpec
from lmdeploy.pytorch.backends.norm import RMSNormBuildSpec

from lmdeploy_deeplink.engine import layers
from lmdeploy_deeplink.operators.vendor import Vendor


def backend(vendor: Vendor, collective: str) -> type[DefaultOpsBackend]:
    """A class of LMDeploy's kind for this vendor. What a vendor has no operator for is LMDeploy's own torch code.

    `collective` is torch.distributed's name for what sums over processes.
    """

    class VendorOpsBackend(layers.Answers, DefaultOpsBackend):
        vendor_name, sums_by = vendor.name, collective

        @classmethod
        def build_op(cls, spec: Any, *, enable_deterministic: bool = False) -> Any:
            if isinstance(spec, PagedAttentionBuildSpec):
                return layers.Attention(vendor, spec)
            if isinstance(spec, RMSNormBuildSpec):
                return layers.RMSNorm(vendor, spec)
            if isinstance(spec, SiluAndMulBuildSpec):
                return layers.SiluAndMul(vendor)
            if isinstance(spec, ApplyRotaryEmbBuildSpec):
                return layers.ApplyRotaryEmb(vendor)
            if isinstance(spec, LinearBuildSpec):
                return layers.Linear(vendor)
            if isinstance(spec, SoftmaxTopKBuildSpec):
                return layers.SoftmaxTopK(vendor, spec)
            if isinstance(spec, FusedMoEBuildSpec):
                return layers.FusedMoE(vendor, spec)
            return super().build_op(spec, enable_deterministic=enable_deterministic)

        @staticmethod
        def support_ray() -> bool:
            return True

    return VendorOpsBackend
