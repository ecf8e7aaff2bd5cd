"""A program for LMDeploy's Python: which layers are made of a vendor's operators, and which are refused, by field.

Prints {"backend", "taken": the class of a plain attention layer, "refused": [field, …], "seen": where "cuda" is}.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from lmdeploy_deeplink import engine

DEVICE = engine.install()


def main() -> None:
    import torch
    from lmdeploy.pytorch.backends import get_backend
    from lmdeploy.pytorch.backends.attention import PagedAttentionBuildSpec
    from lmdeploy.pytorch.backends.moe import FusedMoEBuildSpec, SoftmaxTopKBuildSpec

    from deeplink.errors import UnsupportedOperator

    plain = PagedAttentionBuildSpec(
        num_heads=4,
        head_dim=64,
        scale=None,
        num_kv_heads=2,
        v_head_dim=64,
        alibi=False,
        sliding_window=None,
        logit_softcapping=0.0,
        causal=True,
        use_flash_mla=False,
        mla_index_topk=None,
        learnable_sink=False,
        block_sparse_size=1,
    )
    experts = FusedMoEBuildSpec(
        top_k=2,
        num_experts=4,
        renormalize=True,
        hidden_dim=64,
        ep_size=2,
        ep_group=None,
        layer_idx=0,
        output_dtype=torch.bfloat16,
        num_max_dispatch_tokens_per_rank=1,
    )
    unlike: list[Any] = [
        replace(plain, alibi=True),
        replace(plain, sliding_window=(64, 64)),
        replace(plain, logit_softcapping=30.0),
        replace(plain, causal=False),
        replace(plain, learnable_sink=True),
        SoftmaxTopKBuildSpec(2, n_groups=2),
        experts,
    ]
    backend = get_backend(DEVICE)
    refused = []
    for spec in unlike:
        try:
            backend.build_op(spec)
        except UnsupportedOperator as exc:
            refused.append(exc.field)
    told = {
        "backend": backend.get_name(),
        "taken": type(backend.build_op(plain)).__name__,
        "refused": refused,
        "seen": torch.zeros(1, device="cuda").device.type,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
