"""What a model costs: bytes of weights, bytes of KV cache for a token, operations for a token. From its config.json.

The config is Hugging Face's. What it does not say (such as the exact size of norms and biases) is below a thousandth of
what counts here. Quantised weights are counted at their bits per weight with the scales that go with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deeplink.errors import FleetError
from deeplink.kvconnector.layouts.layout import ELEMENTS

Config = Mapping[str, Any]

_UNGATED = ("Bloom", "OPT", "GPT", "Falcon", "Phi", "Starcoder2", "MPT")
"""Architectures whose MLP has two matrices; all later ones have three, of which one gates."""

_SCALES_BITS = 16
_DTYPES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes of one model. Parameters are counts; `bits` are of one stored weight of a linear layer, scales included.

    `shared` parameters are read for every token (attention, dense and shared MLPs, the output head); of the `experts`
    of each of `expert_layers` layers, with `expert` parameters each, a token reads `chosen`. `embedding` parameters are
    stored and only looked up. `kv_elements` are cached for a token in each layer: K and V of all heads, or one latent
    vector, which is then on every chip of a group (`replicated`). `window` is how many tokens a layer looks back, 0 for
    all, and `full_layers` how many layers look at all.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    shared: float
    expert: float = 0.0
    experts: int = 0
    chosen: int = 0
    expert_layers: int = 0
    embedding: float = 0.0
    bits: float = 16.0
    element: str = "bfloat16"
    kv_elements: int = 0
    replicated: bool = False
    window: int = 0
    full_layers: int = 0

    @property
    def parameters(self) -> float:
        return self.shared + self.embedding + self.expert * self.experts * self.expert_layers

    @property
    def active(self) -> float:
        """Parameters one token is multiplied with."""
        return self.shared + self.expert * self.chosen * self.expert_layers

    @property
    def weight_bytes(self) -> float:
        return (self.parameters - self.embedding) * self.bits / 8 + self.embedding * _DTYPES.get(self.element, 2.0)

    def read_bytes(self, tokens: float) -> float:
        """Bytes of weights that a step of `tokens` tokens reads. With experts, those that any of the tokens chose:
        each misses one with probability 1 - chosen/experts."""
        if not self.experts:
            return self.shared * self.bits / 8
        missed: float = (1 - self.chosen / self.experts) ** max(tokens, 1.0)
        touched = self.experts * (1 - missed)
        return (self.shared + self.expert * touched * self.expert_layers) * self.bits / 8

    def kv_bytes(self, dtype: str) -> float:
        """Bytes of cache for one token, all layers, with elements of `dtype`."""
        return float(self.kv_elements * self.layers * ELEMENTS[dtype])

    def attention_flops(self, tokens: float, context: float) -> float:
        """Operations of attention itself for `tokens` new tokens, each looking at `context` tokens on average."""
        near = min(context, self.window) if self.window else context
        layers = self.full_layers * context + (self.layers - self.full_layers) * near
        return 4.0 * self.heads * self.head_dim * tokens * layers


def parse(config: Config, name: str = "") -> Model:
    """Raises FleetError, which names the field of the config that is missing or not understood."""
    config = config.get("text_config") or config
    layers = _count(config, "num_hidden_layers", "n_layer", "num_layers")
    hidden = _count(config, "hidden_size", "n_embd", "n_embed", "d_model")
    heads = _count(config, "num_attention_heads", "n_head", "num_heads")
    kv_heads = _count(config, "num_key_value_heads", default=heads)
    head_dim = _count(config, "head_dim", default=hidden // heads)
    vocabulary = _count(config, "vocab_size")
    architecture = (config.get("architectures") or [""])[0]
    matrices = 2 if architecture.startswith(_UNGATED) else 3
    intermediate = _count(config, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)

    latent = _count(config, "kv_lora_rank", default=0)
    if latent:
        rope = _count(config, "qk_rope_head_dim")
        nope, value = _count(config, "qk_nope_head_dim"), _count(config, "v_head_dim")
        query = _count(config, "q_lora_rank", default=0)
        ask = hidden * query + query * heads * (nope + rope) if query else hidden * heads * (nope + rope)
        attention = ask + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
        kv_elements, head_dim = latent + rope, nope + rope
    else:
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        kv_elements = 2 * kv_heads * head_dim

    experts = _count(config, "n_routed_experts", "num_experts", "num_local_experts", default=0)
    expert_layers = _expert_layers(config, layers) if experts else 0
    expert = matrices * hidden * _count(config, "moe_intermediate_size", default=intermediate) if experts else 0
    always = _count(config, "n_shared_experts", default=0) * expert
    always += matrices * hidden * _count(config, "shared_expert_intermediate_size", default=0) if experts else 0
    dense = matrices * hidden * intermediate
    head = vocabulary * hidden
    tied = bool(config.get("tie_word_embeddings", False))
    window = _count(config, "sliding_window", default=0) if config.get("use_sliding_window", True) else 0
    return Model(
        name=name or str(config.get("_name_or_path") or architecture or "model"),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        shared=float(
            layers * attention + (layers - expert_layers) * dense + expert_layers * (always + hidden * experts) + head
        ),
        expert=float(expert),
        experts=experts,
        chosen=_count(config, "num_experts_per_tok", "num_experts_per_token", default=0) if experts else 0,
        expert_layers=expert_layers,
        embedding=0.0 if tied else float(head),
        bits=_bits(config),
        element=_element(config),
        kv_elements=kv_elements,
        replicated=bool(latent),
        window=window,
        full_layers=_full_layers(config, layers) if window else layers,
    )


def _count(config: Config, *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise FleetError(
                f"the model's config has no usable {name}", field=name, ours=repr(value), remedy="give a whole number"
            )
        return value
    if default is None:
        raise FleetError(
            f"the model's config has no {names[0]}", field=names[0], remedy="use the checkpoint's own config.json"
        )
    return default


def _expert_layers(config: Config, layers: int) -> int:
    every = _count(config, "decoder_sparse_step", "moe_layer_freq", default=1) or 1
    first = _count(config, "first_k_dense_replace", default=0)
    dense = set(config.get("mlp_only_layers") or ())
    return sum(1 for layer in range(first, layers) if layer not in dense and (layer + 1) % every == 0)


def _full_layers(config: Config, layers: int) -> int:
    kinds = config.get("layer_types")
    return sum(1 for kind in kinds if kind == "full_attention") if kinds else 0


def _element(config: Config) -> str:
    element = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if element not in _DTYPES:
        raise FleetError(
            "the model's element type is not known",
            field="torch_dtype",
            ours=element,
            remedy=f"one of {sorted(_DTYPES)}",
        )
    return element


def _bits(config: Config) -> float:
    """Bits of one weight. A group's scale (and zero point, where there is one) is counted with its weights."""
    quantization = config.get("quantization_config")
    if not quantization:
        return 8 * _DTYPES[_element(config)]
    method = str(quantization.get("quant_method", ""))
    bits = quantization.get("bits") or {"fp8": 8, "mxfp4": 4, "bitsandbytes": 4}.get(method)
    if bits is None:  # compressed-tensors keeps it one level down, for each group of layers
        groups = quantization.get("config_groups") or {}
        bits = next((g["weights"]["num_bits"] for g in groups.values() if g.get("weights")), None)
    if not isinstance(bits, int) or bits <= 0:
        raise FleetError(
            f"the bits of a weight quantised by {method or 'an unnamed method'} are not known",
            field="quantization_config",
            ours=repr(dict(quantization))[:200],
            remedy="add bits to quantization_config",
        )
    group = quantization.get("group_size") or (32 if method == "mxfp4" else 0)
    scale = (8 if method == "mxfp4" else _SCALES_BITS + (0 if quantization.get("sym", True) else bits)) if group else 0
    return bits + (scale / group if group and group > 0 else 0.0)
