"""dlinfer's operators as a vendor, where dlinfer is installed: known by the parameters that its functions take.

dlinfer is built for one chip, so it is one vendor per environment; beside it others may be in the same process. Its
operators changed their parameters between releases without a change of name, so each is compared with the parameters
written down here (dlinfer 0.2.8), and one that takes others is absent, with the reason.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deeplink.errors import PluginError, UnsupportedOperator

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from lmdeploy_deeplink.operators.vendor import Vendor

NAME = "dlinfer"

# The chips dlinfer is built for: torch's name of the device, and whether a block's heads or its tokens come first.
_DEVICES = {"ascend": "npu", "camb": "mlu", "maca": "cuda"}
_HEAD_FIRST = ("camb",)

_CACHED = "block_table block_size"
_COMMON = "num_q_heads num_kv_heads"
_PAGED_END = "softmax_scale alibi_slopes attn_output kv_scales kv_zeros quant_bits"
PARAMETERS = {
    "add_rms_norm": "hidden_states residual weight epsilon",
    "add_rms_norm_w8a8": "hidden_states residual weight epsilon quant_dtype",
    "apply_rotary_pos_emb": "query key cos sin",
    "dynamic_quant": "x quant_dtype quant_granularity",
    "fill_contiguous_kvcache": "key_cache value_cache key_state value_state",
    "fill_kv_cache": "key value key_cache value_cache kv_indices k_scales_zeros v_scales_zeros quant_bits",
    "fused_attention": "query_states key_states value_states mask",
    "fused_moe": "hidden_states gate_up_weights down_weights topk_weights topk_ids topk renormalize moe_metadata "
    "chunked_moe_layout",
    "get_cache_len": "cache",
    "incre_flash_attention": "query key value num_heads input_layout softmax_scale",
    "linear": "x weight bias all_reduce group",
    "linear_w8a8": "a b rms_scale linear_scale out_dtype quant_dtype bias",
    "moe_gating_topk_softmax": "router_logits topk moe_metadata",
    "paged_decode_attention": f"query key_cache value_cache {_CACHED} q_seq_len kv_seq_len max_kv_seq_len {_COMMON} "
    f"head_size_v {_PAGED_END}",
    "paged_prefill_attention": f"query key value key_cache value_cache {_CACHED} q_start_loc q_seq_len kv_seq_len "
    f"cu_seq_lens_kv max_q_seq_len max_kv_seq_len {_COMMON} attn_mask head_size_v {_PAGED_END}",
    "prefill_attention": f"query key value key_cache value_cache q_start_loc q_seq_len kv_seq_len max_q_seq_len "
    f"{_COMMON} attn_mask softmax_scale alibi_slopes attn_output",
    "rms_norm": "hidden_states weight epsilon",
    "rms_norm_w8a8": "hidden_states weight epsilon quant_dtype",
    "silu_and_mul": "input_tensor dim",
    "transdata": "hidden_states transdata_type",
    "weight_quant_matmul": "x1 x2 scale offset bias all_reduce group_size",
}


def load() -> Vendor:
    """Raises PluginError where dlinfer is not installed, does not load, or is built for an unknown chip."""
    from lmdeploy_deeplink.operators.vendor import BLOCK_FIRST, HEAD_FIRST, Operators, Vendor

    package, ops, vendor, annotations = (
        _imported(f"dlinfer{name}") for name in ("", ".ops", ".vendor", ".utils.type_annotation")
    )
    chip = vendor.vendor_name
    if chip not in _DEVICES:
        raise PluginError(
            "this dlinfer is built for a chip that this release does not know",
            field="chip",
            ours=", ".join(_DEVICES),
            theirs=str(chip),
        )
    found: dict[str, Callable[..., Any]] = {}
    absent: dict[str, str] = {}
    for name, parameters in PARAMETERS.items():
        if name not in vendor.vendor_ops_registry or not hasattr(ops, name):
            continue
        takes = list(inspect.signature(getattr(ops, name)).parameters)
        if takes != parameters.split():
            absent[name] = f"dlinfer's takes ({', '.join(takes)}), where ({parameters.replace(' ', ', ')}) is known"
            continue
        found[name] = _telling(name, getattr(ops, name))
    _adapt(found, annotations)
    axes = HEAD_FIRST if chip in _HEAD_FIRST else BLOCK_FIRST
    version = f"{getattr(package, '__version__', 'unknown')} for {chip}"
    return Vendor(NAME, version, _DEVICES[chip], Operators(**found), axes, absent)


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    # What a package does that loads a chip's libraries as it is imported.
    except (ImportError, OSError, RuntimeError, AttributeError) as exc:
        missing = isinstance(exc, ModuleNotFoundError) and exc.name == "dlinfer"
        raise PluginError(
            "dlinfer is not installed" if missing else f"{name} does not load: {exc!r}",
            remedy="run deeplink with the Python of an environment made for the chip",
        ) from exc


def _telling(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """dlinfer's vendors say that something is not there in three ways; here it is one."""

    def called(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except RuntimeError as exc:  # of which what is not implemented is a kind
            if not isinstance(exc, NotImplementedError) and "support" not in str(exc):
                raise
            raise UnsupportedOperator(f"dlinfer: {exc}", field=name) from exc

    return called


def _adapt(found: dict[str, Callable[..., Any]], annotations: ModuleType) -> None:
    """Where dlinfer's vendors give the right numbers in other shapes, or need to be told what is the case here."""

    def alone() -> Any:
        return annotations.MoeMetadata(moe_comm_type=annotations.MoECommType.NAIVE)

    if rotary := found.get("apply_rotary_pos_emb"):

        def apply_rotary_pos_emb(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            turned_query, turned_key = rotary(query, key, cos, sin)
            return turned_query.reshape(query.shape), turned_key.reshape(key.shape)

        found["apply_rotary_pos_emb"] = apply_rotary_pos_emb

    if gating := found.get("moe_gating_topk_softmax"):

        def moe_gating_topk_softmax(
            router_logits: Tensor, topk: int, moe_metadata: object | None
        ) -> tuple[Tensor, Tensor]:
            weights, experts = gating(router_logits, topk, alone() if moe_metadata is None else moe_metadata)
            return weights.reshape(-1, topk), experts.reshape(-1, topk)

        found["moe_gating_topk_softmax"] = moe_gating_topk_softmax

    if moe := found.get("fused_moe"):

        def fused_moe(
            hidden_states: Tensor,
            gate_up_weights: Tensor,
            down_weights: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            topk: int,
            renormalize: bool,
            moe_metadata: object | None,
        ) -> Tensor:
            told = alone() if moe_metadata is None else moe_metadata
            result: Tensor = moe(
                hidden_states, gate_up_weights, down_weights, topk_weights, topk_ids, topk, renormalize, told
            )
            return result

        found["fused_moe"] = fused_moe
