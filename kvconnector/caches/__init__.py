"""An engine's KV cache as it lies in one process, and what an engine plugin hands to an `endpoint`.

cache         its arrays, in host memory; device_cache  as torch has them
group         the layers that are alike, as one rank holds them
proof         that they are laid out as declared
"""
