"""Moving a cache between an engine's blocks and the wire form, with digests and casts on the way.

    plan       which tokens travel together, and where they lie
    moves      the strided copies that this takes
    convert    doing them, on the host; device  where torch has the cache
    digest     a digest that survives it; in_blocks  of a chunk where it lies
    casting    from one element type to another; codes, quantize  what that is made of; recast  of a whole chunk

By numpy, or to the same bytes by compiled loops, where `compiled` says that numba is there:

    kernels    gather and scatter; slices  digests; xxh3  their function
    jobs       moves as a table; loops  one row of it; vectors  the instructions; jit  how it is compiled

Nothing here knows of peers, tickets or sockets.
"""
