"""Makes an engine pack its CPU cache as it would on another machine. Loaded by vLLM as a general plugin.

`DEEPLINK_TESTING_ISA=vec` pretends that there is no AMX. `amx` packs with the engine's own AMX kernel on any machine:
where there is no AMX to compute with, the blocks of a step are unpacked into a scratch cache, and the vector kernel
computes on that. Either way the cache's bytes are written by the engine's kernel and are the real packing.
"""

from __future__ import annotations

import os

VARIABLE = "DEEPLINK_TESTING_ISA"


def install() -> None:
    wanted = os.environ.get(VARIABLE)
    if wanted == "vec":
        import torch

        torch.cpu._is_amx_tile_supported = lambda: False
    elif wanted == "amx":
        import torch

        if not torch.cpu._is_amx_tile_supported():
            _emulate()


def _emulate() -> None:
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder

    compute = ops.cpu_attention_with_kv_cache
    set_isa = getattr(CPUAttentionMetadataBuilder, "_set_isa_to_layers", None)
    make = CPUAttentionBackendImpl.__init__

    def pack_amx(self: CPUAttentionMetadataBuilder, layer_names: list[str]) -> None:
        # The layer's ISA chooses how the cache is written, the builder's how attention is scheduled.
        assert self.isa == "vec"
        self.isa = "amx"
        set_isa(self, layer_names)
        self.isa = "vec"

    def make_amx(self: CPUAttentionBackendImpl, *arguments, **options) -> None:  # type: ignore[no-untyped-def]
        # Before 0.29 the implementation decides for itself how the cache is written.
        make(self, *arguments, **options)
        assert self.isa == "vec"
        self.isa = "amx"

    def unpack(key_cache, value_cache, block_table):  # type: ignore[no-untyped-def]
        used = block_table.unique().long()
        used = used[(used >= 0) & (used < key_cache.shape[0])]
        key, value = key_cache.new_zeros(key_cache.shape), value_cache.new_zeros(value_cache.shape)
        blocks, heads, tokens, dim = len(used), *key_cache.shape[1:]
        k = key_cache[used].reshape(blocks, heads, tokens // 16, dim // 2, 16, 2)
        v = value_cache[used].reshape(blocks, heads, dim // 16, tokens // 2, 16, 2)
        # To the vector packing: K is [dim, token], V is [token, dim].
        key[used] = k.permute(0, 1, 3, 5, 2, 4).reshape(blocks, heads, tokens, dim)
        value[used] = v.permute(0, 1, 3, 5, 2, 4).reshape(blocks, heads, tokens, dim)
        return key, value

    def attention(**arguments):  # type: ignore[no-untyped-def]
        key, value = unpack(arguments["key_cache"], arguments["value_cache"], arguments["block_table"])
        compute(**{**arguments, "key_cache": key, "value_cache": value})

    if set_isa is None:
        CPUAttentionBackendImpl.__init__ = make_amx
    else:
        CPUAttentionMetadataBuilder._set_isa_to_layers = pack_amx
    ops.cpu_attention_with_kv_cache = attention
