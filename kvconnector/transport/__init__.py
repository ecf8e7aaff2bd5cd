"""How bytes get from one staging memory to another. One module per transport; `base` is the seam.

staging   the memory that peers may touch; arena  lent to another process; quarantine  not to be used again yet
start     the transports of a process
tcp       over sockets: batch, answer, windows
shm       on one host: ring
nixl, mooncake, dlslime  by one-sided libraries: library, onesided, pusher, pieces, arenas, regions, talk
"""
