"""All rows of `deeplink bench kv`, by the module that measures them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Family:
    """`module` has ``measure(rows, scale)``, which yields a `Row` or a `Skipped` for each that is wanted, and is called
    in a process of its own: one that fails takes no other family's rows with it.

    With `in_engine` that process is the engine environment's Python where there is one, with torch and vLLM; with
    `system` it finds libraries that were unpacked beside the interpreter.
    """

    name: str
    module: str
    rows: tuple[str, ...]
    in_engine: bool = False
    system: bool = False


RELAYOUTS = (
    *(
        "reblock_16",
        "reblock_128",
        "nhd",
        "kv_order",
        "kv_interleaved",
        "head_slice",
        "head_slice_nhd",
        "half_pages",
        "nz",
    ),
    *("cpu_vec", "cpu_amx"),
)
FAMILIES = (
    Family("shm", "deeplink.bench.loopback", ("shm_4096x32k", "shm_4096x32k_digest", "shm_staging")),
    Family("tcp", "deeplink.bench.loopback", ("tcp_loopback", "tcp_loopback_digest", "tcp_staging")),
    Family("ranks", "deeplink.bench.ranks", ("tp_1_2", "tp_2_1")),
    Family("link_1gbit", "deeplink.bench.links", ("link_1gbit_reblock", "link_1gbit_socket")),
    Family("link_10ms", "deeplink.bench.links", ("link_500mbit_10ms",)),
    Family("link_loss", "deeplink.bench.links", ("link_500mbit_10ms_loss",)),
    Family("resume", "deeplink.bench.links", ("resume_resent",)),
    Family(
        "relayout",
        "deeplink.bench.relayout",
        (
            *(f"relayout_{name}_{way}" for name in RELAYOUTS for way in ("gather", "scatter")),
            "digest",
            "digest_cpu_vec",
            "digest_cpu_amx",
        ),
        in_engine=True,
    ),
    Family("nixl", "deeplink.bench.libraries", ("nixl",)),
    Family("mooncake", "deeplink.bench.libraries", ("mooncake",), system=True),
    Family("builtin", "deeplink.bench.builtin", ("builtin_nixl",)),
)
NAMES = tuple(row for family in FAMILIES for row in family.rows)


def chosen(patterns: Collection[str]) -> tuple[str, ...]:
    """The rows that these names or patterns (``relayout_*``) are about, all without any. Raises ValueError for one
    that is about none."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in NAMES):
            raise ValueError(f"no row is called {pattern!r}; there are {', '.join(NAMES)}")
    return tuple(name for name in NAMES if not patterns or any(fnmatchcase(name, p) for p in patterns))
