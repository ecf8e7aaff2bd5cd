"""The kinds of engines that placements are of, and what each can do where.

What is refused here is what an engine would refuse as it starts, by the name of the same setting: SGLang's and
LMDeploy's plugins hand over less than vLLM's does (docs/sglang.md, docs/lmdeploy.md). And groups of processors of
LMDeploy's: their commands would need Ray, with its workers told of deeplink. What an engine that serves alone
can do is its own matter; nothing of deeplink is in its way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from deeplink.chips.profile import Profile

Kind = Literal["vllm", "sglang", "lmdeploy"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DEFAULT: Kind = "vllm"

TITLES: Mapping[Kind, str] = {"vllm": "vLLM", "sglang": "SGLang", "lmdeploy": "LMDeploy"}
"""As chips' profiles call them."""

LAYOUTS: Mapping[Kind, str] = {"vllm": "vllm-nhd", "sglang": "sglang-nhd", "lmdeploy": "lmdeploy-cuda"}
"""Of their caches, by the names of the catalogue of layouts, where nothing else is said."""

_FLOATS = ("float32", "bfloat16", "float16")
_HALVES = ("bfloat16", "float16")
DTYPES: Mapping[Kind, tuple[str, ...]] = {
    "vllm": (*_FLOATS, "float8_e4m3fn", "float8_e5m2"),
    "sglang": (*_FLOATS, "float8_e4m3fn", "float8_e5m2"),
    "lmdeploy": _HALVES,
}
"""Element types of the caches that commands are written for."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why no engine does something: the setting, its value there, and the values that there could be."""

    why: str
    field: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.why} ({self.field}: {self.ours}, where it would have to be {self.theirs})"


@dataclass(frozen=True, slots=True)
class HandsOver:
    """What an engine's cache has to be to be handed over: of one of these `dtypes`, on `most` chips at most, in host
    memory, and plain K and V for each layer."""

    dtypes: tuple[str, ...]
    most: int


_HANDS_OVER: Mapping[Kind, HandsOver] = {"sglang": HandsOver(_FLOATS, 1), "lmdeploy": HandsOver(_HALVES, 1)}
"""A kind that is not here hands over whatever it can keep."""
_SPANS: frozenset[Kind] = frozenset({"vllm"})
_PARALLEL_ON_PROCESSORS: frozenset[Kind] = frozenset({"vllm"})


def cannot_hand_over(kind: Kind, *, dtype: str, latent: bool, window: int, processor: bool) -> Obstacle | None:
    """What keeps engines of a kind from prefilling for others and from decoding what others have prefilled, whatever
    their size. `dtype` is the cache's, which is `latent` where it has one vector for each token instead of K and V
    (MLA); `window` is how many tokens a layer looks back, 0 for all."""
    known = _HANDS_OVER.get(kind)
    if known is None:
        return None
    title = TITLES[kind]
    if not processor:
        return Obstacle(f"{title} hands over from host memory only", "device", "the chip's memory", "host memory")
    if latent:
        return Obstacle(f"{title} hands over K and V only", "kind of KV cache", "MLA", "K and V of each layer")
    if window:
        return Obstacle(f"{title} hands over full attention only", "window", str(window), "0")
    if dtype not in known.dtypes:
        return Obstacle(f"{title} does not hand over such elements", "kv_dtype", dtype, " or ".join(known.dtypes))
    return None


def too_large(kind: Kind, size: int, *, hands_over: bool, hosts: int, processor: bool) -> Obstacle | None:
    """What keeps an engine of a kind from being on `size` chips, on so many hosts."""
    title = TITLES[kind]
    if hosts > 1 and kind not in _SPANS:
        return Obstacle(f"{title} on several hosts was not tested", "hosts", str(hosts), "1")
    if processor and size > 1 and kind not in _PARALLEL_ON_PROCESSORS:
        return Obstacle(f"{title} on several processors is not in the commands that are written", "tp", str(size), "1")
    known = _HANDS_OVER.get(kind)
    if known is not None and hands_over and size > known.most:
        return Obstacle(
            f"{title} is planned to hand over from groups of this size at most", "tp", str(size), str(known.most)
        )
    return None


def profile_of(chip: str, named: str, profiles: Mapping[str, Profile]) -> Profile | None:
    """What is known of a chip: the profile that the fleet file named, or the one whose title or name the chip has."""
    if named:
        return profiles.get(named)
    for profile in profiles.values():
        if chip in (profile.title, profile.name) or profile.is_model(chip):
            return profile
    return None


def served(profile: Profile) -> tuple[Kind, ...]:
    """The kinds that are known to run on a chip."""
    known = {one.engine for one in profile.served}
    return tuple(kind for kind in KINDS if TITLES[kind] in known)
