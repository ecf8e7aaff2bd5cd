"""Claims that come while prefill has not ended: when they may have blocks, and how many all of them together.

vLLM gives a request all its blocks before the first of them is loaded into, and takes them from no request that waits
for its load. So an early claim is put off ("ask again") until prefill has staged something, and early claims hold no
more blocks than what lets everybody else go on:

- at most half of the cache, as the other half is for those that decode;
- never so many that a request of the greatest length would not fit beside them. Or one whose cache is staged already
  could wait for an early claim's blocks, and that for its prefill, which waits for room in staging, which the first one
  has filled: a circle that only a deadline ends.

A claim that does not fit in is made once its prefill is complete, as it would be if it had not come early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from deeplink.kvconnector.handoffs.handoff import BEGUN, COMPLETE
from deeplink.kvconnector.handoffs.ticket import Ticket


class Watcher(Protocol):
    """`deeplink.kvconnector.handoffs.watching.Watching`, as far as it is used here."""

    def stage(self, ticket: Ticket, until: float) -> int: ...

    def forget(self, ticket: Ticket) -> None: ...


class EarlyClaims:
    """The early claims of one engine, by request. `blocks` says how many blocks the cache has, `sizes` are the tokens
    of a block in each cache group, and `longest` the tokens of the longest request."""

    def __init__(self, watcher: Watcher, blocks: Callable[[], int], sizes: Sequence[int], longest: int) -> None:
        self._watcher = watcher
        self._blocks = blocks
        self._sizes = sizes
        self._longest = longest
        self._held: dict[str, int] = {}

    @property
    def held(self) -> int:
        """Blocks that early claims have been promised."""
        return sum(self._held.values())

    @property
    def bound(self) -> int:
        """The most that they may be."""
        total = self._blocks()
        return max(0, min(total // 2, total - self._need(self._longest)))

    def due(self, request: str, ticket: Ticket, until: float, tokens: int) -> bool:
        """Whether the claim of a prompt of `tokens` tokens may be made now. `until` is the ticket's deadline, of
        time.monotonic(): then it may in any case. Once it is due it stays so."""
        if request in self._held:
            return True
        stage = self._watcher.stage(ticket, until)
        need = self._need(tokens) if stage < COMPLETE else 0
        if stage < BEGUN or self.held + need > self.bound:
            return False
        self._watcher.forget(ticket)
        self._held[request] = need
        return True

    def over(self, request: str, ticket: Ticket | None = None) -> None:
        """It has been loaded, has failed, or is not wanted any more."""
        self._held.pop(request, None)
        if ticket is not None:
            self._watcher.forget(ticket)

    def _need(self, tokens: int) -> int:
        return sum(-(-tokens // size) for size in self._sizes)
