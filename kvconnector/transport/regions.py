"""Memory that peers may write into, by random key and within bounds, for as long as it is not withdrawn.

For transports whose own threads do the writing. Each of them holds the regions of a write while it writes;
withdrawing takes the key away, interrupts whoever writes, and waits until they have let go. Where a peer does the
writing, one-sided, a thread that stands for it lets go only when that peer has said that it is done.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from deeplink.errors import DeadlineExceeded, Refused
from deeplink.kvconnector.transport.arena import Lent

KEY_BYTES = 16
LET_GO_SECONDS = 30.0

Part = tuple[bytes, int, int]
"""Key, offset, length."""


def _nothing() -> None:
    pass


@dataclass(slots=True, eq=False)
class _Region:
    key: bytes
    memory: memoryview
    owner: Regions
    writers: dict[object, Callable[[], None] | None] = field(default_factory=dict)
    """How each is interrupted; None for one that is lost."""
    lent: Lent | None = None
    """Where the bytes are, if the peer has lent them instead of writing here."""

    def withdraw(self) -> None:
        self.owner.withdraw(self)


class Regions:
    """All regions of one transport. Safe to use from several threads.

    A withdrawal waits `let_go` seconds. With `one_sided`, a writer that ends with an error holds its regions for good:
    nobody knows whether what it stands for still writes.
    """

    def __init__(self, let_go: float = LET_GO_SECONDS, *, one_sided: bool = False) -> None:
        self._let_go = let_go
        self._one_sided = one_sided
        self._regions: dict[bytes, _Region] = {}
        self._changed = threading.Condition()

    def register(self, memory: memoryview) -> _Region:
        region = _Region(secrets.token_bytes(KEY_BYTES), memory.cast("B"), self)
        with self._changed:
            self._regions[region.key] = region
        return region

    def withdraw(self, region: _Region) -> None:
        """When this returns nobody writes into the region any more. Doing it twice is harmless.

        Raises DeadlineExceeded when somebody may still write. With `one_sided`, a later call may find that they have
        stopped, and does not wait for that again.
        """
        with self._changed:
            again = self._regions.pop(region.key, None) is None and self._one_sided
            for interrupt in region.writers.values():
                if interrupt is not None and not again:
                    interrupt()
            # A thread of ours that was interrupted, or only copies memory, ends at once; there the bound guards against
            # a bug. A peer may be frozen.
            self._changed.wait_for(lambda: not any(region.writers.values()), timeout=0 if again else self._let_go)
            if region.writers:
                raise DeadlineExceeded("a writer did not let go of a withdrawn region; it may write there yet")

    def lend(self, part: Part, lent: Lent) -> bool:
        """Take what a peer lends in place of the whole region; false for a part of one. Raises Refused."""
        with self._changed:
            region = self._find(part)
            if part[1] or part[2] != region.memory.nbytes:
                return False
            region.lent = lent
            return True

    @contextlib.contextmanager
    def writing(self, parts: Sequence[Part], interrupt: Callable[[], None] = _nothing) -> Iterator[list[memoryview]]:
        """The memory of `parts`, to be written before this ends; `interrupt` must make a writer that waits stop.

        Raises Refused, and gives nothing, when one of them has no region or leaves it.
        """
        writer = object()
        with self._changed:
            regions = [self._find(part) for part in parts]
            for region in regions:
                region.writers[writer] = interrupt
        certain = not self._one_sided
        try:
            views = zip(regions, parts, strict=True)
            yield [region.memory[offset : offset + length] for region, (_, offset, length) in views]
            certain = True
        finally:
            with self._changed:
                for region in regions:
                    if certain:
                        region.writers.pop(writer, None)
                    else:
                        region.writers[writer] = None
                self._changed.notify_all()

    def _find(self, part: Part) -> _Region:
        key, offset, length = part
        region = self._regions.get(key)
        if region is None:
            raise Refused("no region has this key", field="region")
        if offset + length > region.memory.nbytes:
            raise Refused(f"bytes {offset} to {offset + length} of a region of {region.memory.nbytes}", field="region")
        return region
