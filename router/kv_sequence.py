"""The order of one engine's batches: what to do with the next one that arrives. No IO.

Batches are numbered from 0 at every start of an engine. A missing number is asked for again where the engine keeps
batches to be replayed; what stays missing makes all that was known of the engine doubtful.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deeplink.errors import ProtocolError
from deeplink.router import kv_events
from deeplink.router.kv_index import Index

MAX_HELD = 256
"""Batches that wait for one before them."""


@dataclass(slots=True)
class Sequence:
    """One engine's. `next` is the number that is due; None until one has come."""

    name: str
    index: Index
    next: int | None = None
    held: dict[int, bytes] = field(default_factory=dict)

    def arrived(self, number: int, data: bytes) -> int | None:
        """Takes a batch. Returns the number from which batches are to be replayed, if there is a gap before it."""
        if number == 0:
            # A start: of the engine, whatever we knew of its last life.
            self.held.clear()
            self.index.begin(self.name)
            self._apply(0, data)
            return None
        due = 0 if self.next is None else self.next
        if number == due:
            self._apply(number, data)
            self._go_on()
            return None
        if number < due:
            if number + MAX_HELD < due:
                self.lost("its numbers began anew")
                self.next = None
                return 0
            return None  # once more, from a replay
        self.held[number] = data
        if len(self.held) > MAX_HELD:
            self.skip()
            return None
        return due

    def empty(self) -> None:
        """The engine has not published a batch since its start."""
        self.index.begin(self.name)
        self.next = 0

    def skip(self) -> None:
        """What is missing cannot be had: go on with what there is, in doubt."""
        if not self.held:
            return
        first = min(self.held)
        began = self.next is None
        self.lost("it had begun before the router listened" if began else "events of it were lost")
        self.next = first
        self._go_on()

    def lost(self, why: str) -> None:
        self.index.doubt(self.name, why)

    def _go_on(self) -> None:
        while self.next in self.held:
            number = self.next
            assert number is not None
            self._apply(number, self.held.pop(number))

    def _apply(self, number: int, data: bytes) -> None:
        self.next = number + 1
        try:
            events = kv_events.decode(data)
        except ProtocolError as exc:
            self.lost(f"a batch of it could not be read: {exc.message}")
            return
        self.index.apply(self.name, events)


def number_of(frame: bytes) -> int:
    """The batch's number; -1 ends a replay. Raises ProtocolError."""
    if len(frame) != 8:
        raise ProtocolError("the number of a batch has not 8 bytes", field="sequence", theirs=str(len(frame)))
    return int.from_bytes(frame, "big", signed=True)
