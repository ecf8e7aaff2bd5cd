"""The fused operators an LMDeploy engine runs on, under dlinfer's names, each a protocol that says what it means.

    norms        rms_norm, add_rms_norm, rms_norm_w8a8, add_rms_norm_w8a8
    elementwise  silu_and_mul, apply_rotary_pos_emb
    attention    prefill_attention, paged_prefill_attention, paged_decode_attention, incre_flash_attention,
                 fused_attention
    caches       fill_kv_cache, fill_contiguous_kvcache, get_cache_len
    experts      moe_gating_topk_softmax, fused_moe
    matmul       linear, weight_quant_matmul, dynamic_quant, linear_w8a8
    formats      transdata
    vendor       who brings them: `Vendor`

What holds for all of them:

- They are called by keyword.
- Tensors lie on the vendor's device. T counts tokens of all sequences, one after the other; Hq and Hkv are query and KV
  heads, and query head h reads KV head h // (Hq // Hkv); D is the size of a head, Dv that of a value head.
- Inputs may be strided views: q, k and v of one projection, caches within a pool that holds other things too.
- T may be 0, but not in attention.
- An input may be overwritten only where its protocol says so.
- Sums, softmax and norms are computed in float32 or better whatever the element type; how often a value may be rounded
  to the element type is in `conformance.precision`, and is what the suite holds a vendor to.
- An operator that is called with something its vendor cannot do raises `UnsupportedOperator`.
"""
