"""What a policy is: a pure function from a snapshot of the engines to the one that is to do the work.

A policy is asked twice for a request that is handed over: for prefill, among the engines that can hand over to some
other, and for decode, among those that the chosen one can hand over to. Whether an engine may be used at all is never
its business: those that are down, draining or full are not in the snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Work = Literal["prefill", "decode"]


@dataclass(slots=True)
class View:
    """One engine as a policy sees it while it is asked; not to be changed, nor kept: it goes on with the load.

    `prefill` and `decode` are tokens of requests that were given to it and have not ended: those of prompts not yet
    prefilled, and those whose cache it holds or may come to hold. `requests` counts the same requests. `seconds` is
    what a token took lately, 0 if nothing is known. `cached` is how many tokens of this prompt it probably holds, or,
    with `exact`, as the engine itself says.
    """

    name: str
    prefill: int = 0
    decode: int = 0
    requests: int = 0
    weight: float = 1.0
    seconds: float = 0.0
    cached: int = 0
    exact: bool = False

    @property
    def tokens(self) -> int:
        return self.prefill + self.decode


@dataclass(slots=True)
class Snapshot:
    """All that a choice may depend on; not to be changed. `engines` is never empty.

    `tokens` is the estimated size of the prompt. `turn` counts choices; `dice` are two fresh numbers in [0, 1).
    `session` is what the client names its session by, or empty; `start` stands for how the prompt begins, 0 if it is
    short or the policy does not read prompts.
    """

    work: Work
    engines: tuple[View, ...]
    tokens: int = 0
    turn: int = 0
    dice: tuple[float, float] = (0.0, 0.0)
    session: str = ""
    start: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """`pick` gives the place of one engine in the snapshot. Prompts are hashed and remembered only for policies that
    say `reads_prompts`, and looked up in what engines say they hold for those that say `reads_caches`."""

    pick: Callable[[Snapshot], int]
    reads_prompts: bool = False
    reads_caches: bool = False
