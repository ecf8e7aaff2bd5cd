"""Moving a cache between an engine's blocks and the wire form, with digests and casts on the way.

All of it can be done by numpy and by compiled loops, and the moves by torch for caches on a device, to the same bytes.
Nothing here knows of peers, tickets or sockets. What needs numba is imported where `compiled` says that it is there.
"""
