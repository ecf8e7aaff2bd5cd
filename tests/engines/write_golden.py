"""A program for an engine's environment: caches of known K and V, written by that engine's own cache-write kernel.

write_golden.py TARGET.npz CONFIG_JSON. A cache is called SOURCE/DTYPE/PACKING/BLOCK: its values are those of SOURCE, as
torch converts them to DTYPE. Beside them lies `table`, the blocks of each size in the order of the tokens.
"""

from __future__ import annotations

import json
import sys


def main(target: str, config: str) -> None:
    import numpy as np
    import torch
    import vllm.platforms  # noqa: F401  (the operations are loaded with it)
    from vllm import _custom_ops as ops

    c = json.loads(config)
    H, D, T = c["heads"], c["head_dim"], c["tokens"]
    torch.manual_seed(1)
    # Magnitudes from the subnormals of float16 up to its thousands, both signs, and zeros.
    values = torch.randn(2, H, T, D) * torch.exp2(torch.randint(-22, 12, (2, H, T, D)).float())
    values[:, :, :, ::17] = 0
    written = {}
    for source in c["dtypes"]:
        given = values.to(getattr(torch, source))
        for dtype, packing in c["packings"]:
            key, value = (side.transpose(0, 1).contiguous() for side in given.to(getattr(torch, dtype)))
            for block in c["blocks"]:
                table = torch.tensor(c["tables"][str(block)])
                slots = (table[:, None] * block + torch.arange(block)).flatten()
                blocks = len(table) + 1
                cache = torch.zeros((blocks, H, block, 2 * D), dtype=key.dtype)
                halves = cache.view(blocks, H, 2 * block, D).chunk(2, dim=2)
                ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, packing)
                signed = {2: torch.int16, 4: torch.int32}[cache.element_size()]
                written[f"{source}/{dtype}/{packing}/{block}"] = cache.view(signed).numpy().reshape(-1)
    np.savez(target, **written)


if __name__ == "__main__":
    main(*sys.argv[1:])
