"""The engine-neutral part: it knows bytes, not engines. Nothing in it imports torch or an engine.

What an engine's process has of it, and a plugin holds, lies here:

    endpoint      one process's side: what is produced, claimed, and held
    configured    an endpoint as deeplink.toml says it
    control       the HTTP endpoint: contract, state, metrics, cancel
    metrics       what it tells Prometheus
    passage       a ticket's way past an engine's HTTP server
    registration  telling a router that the engine is there

What they are made of, each on those below it alone (held by import-linter):

    handoffs   a handoff from its ticket to its end       prefixes  prefixes in files, for several engines
    caches     an engine's cache in one process           transport from staging to staging: tcp, shm, libraries
    relayout   between blocks and the wire form           wires     connections that prove who speaks
    contracts  two statements: agreement or refusal
    layouts    what the bytes of a cache mean

The router and the solver use `layouts` and `contracts` only, and of handoffs what a ticket says and can come to.
"""
