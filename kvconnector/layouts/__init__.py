"""What the bytes of a KV cache mean: the notation, the element types, and the layouts of known engines.

Pure, and of one cache alone: what two sides may do with each other's is in `contracts`, the moving in `relayout`.
"""
