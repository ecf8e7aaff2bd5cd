"""Any order of claims, fills, preemptions, aborts, cancels, expiries and late notices, on one pair of engines.

Hypothesis chooses the order; the sockets and threads are real. Every handoff has a block of its own on the consumer's
side, so in the end each block must hold what its handoff's fate says, and nothing may be held.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from loopback import BLOCKS, make_pair, read

from deeplink.errors import TicketRefused
from deeplink.kvconnector.consumer import Outcome
from deeplink.kvconnector.handoff import FINAL
from deeplink.kvconnector.ticket import Ticket

TILE = 16 * 1536
SHORT = 0.03


@dataclass
class Handoff:
    ticket: Ticket
    text: str
    ours: list[int]
    block: int
    tokens: int
    computed: int = 0
    opened: bool = False
    loads: int = 0
    range: tuple[int, int] = (0, 0)
    outcomes: list[Outcome] = field(default_factory=list)


class Handoffs(RuleBasedStateMachine):
    handoffs = Bundle("handoffs")

    def __init__(self) -> None:
        super().__init__()
        self.pair = make_pair(producer={"staging": 6 * TILE, "chunk": 2 * TILE}, consumer={"staging": 4 * TILE})
        self.producer = self.pair.producer.endpoint.producer
        self.consumer = self.pair.consumer.endpoint.consumer
        self.before = read(self.pair.consumer.cache, range(BLOCKS), 0, BLOCKS * 128)
        self.all: dict[str, Handoff] = {}
        self.final: dict[tuple[str, str], str] = {}

    @rule(target=handoffs, tokens=st.integers(1, 110), first=st.integers(0, 22), short=st.booleans())
    def mint(self, tokens: int, first: int, short: bool) -> Handoff:
        ticket, text = self.pair.ticket(SHORT if short else 60)
        handoff = Handoff(ticket, text, [first, first + 1], len(self.all) % BLOCKS, tokens)
        self.all[ticket.handoff] = handoff
        return handoff

    @rule(handoff=handoffs)
    def open(self, handoff: Handoff) -> None:
        if handoff.opened:
            with contextlib.suppress(TicketRefused):
                self.pair.open(handoff.ticket, handoff.tokens)
                raise AssertionError("a handoff was opened twice")
            return
        self.pair.open(handoff.ticket, handoff.tokens)
        handoff.opened = True

    @rule(handoff=handoffs, data=st.data(), prompt=st.sampled_from([b"prompt"] * 4 + [b"another"]))
    def claim(self, handoff: Handoff, data: st.DataObject, prompt: bytes) -> None:
        if handoff.loads == 0:
            start = data.draw(st.integers(0, handoff.tokens))
            handoff.range = start, data.draw(st.integers(start, handoff.tokens))
        handoff.loads += 1
        start, stop = handoff.range
        self.pair.load(self.pair.order(handoff.ticket, handoff.text, [handoff.block], stop, start=start, prompt=prompt))

    @rule(handoff=handoffs, more=st.integers(1, 110))
    def fill(self, handoff: Handoff, more: int) -> None:
        handoff.computed = min(handoff.tokens, handoff.computed + more)
        self.pair.fill(handoff.ticket, handoff.ours, handoff.computed)

    @rule(handoff=handoffs)
    def fill_up(self, handoff: Handoff) -> None:
        self.fill(handoff, handoff.tokens)

    @rule(handoff=handoffs)
    def preempt(self, handoff: Handoff) -> None:
        handoff.computed = 0
        self.producer.lose(handoff.ticket.handoff)

    @rule()
    def pump(self) -> None:
        self.producer.pump()

    @rule(handoff=handoffs)
    def abort(self, handoff: Handoff) -> None:
        self.producer.abort(handoff.ticket.handoff)

    @rule(handoff=handoffs, request=st.sampled_from([None, "request", "another"]))
    def cancel(self, handoff: Handoff, request: str | None) -> None:
        self.consumer.cancel(handoff.ticket.handoff, request)

    @rule(seconds=st.sampled_from([0.001, 0.005, SHORT]))
    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    @rule()
    def collect(self) -> None:
        for outcome in self.consumer.collect():
            self.all[outcome.order.ticket.handoff].outcomes.append(outcome)

    @invariant()
    def staging_is_bounded(self) -> None:
        for side in (self.pair.producer, self.pair.consumer):
            for staging in (side.endpoint._outgoing, side.endpoint._incoming):
                assert 0 <= staging.used <= staging.capacity
        assert self.producer.claims >= 0

    @invariant()
    def a_final_state_stays(self) -> None:
        for side in (self.pair.producer, self.pair.consumer):
            for name, handoff in self.all.items():
                record = side.record(handoff.ticket)
                if record is not None and record.state in FINAL:
                    assert self.final.setdefault((side.epoch, name), record.state) == record.state

    @invariant()
    def blocks_that_are_needed_are_kept(self) -> None:
        """Settled means: all is staged, or the handoff is over."""
        for handoff in self.all.values():
            if handoff.opened and self.producer.settled(handoff.ticket.handoff):
                record = self.pair.producer.record(handoff.ticket)
                assert record is not None
                # The ledger hears of the end just after the handoff is gone.
                assert record.state != "filling" or self._ends(handoff)

    def _ends(self, handoff: Handoff) -> bool:
        deadline = time.monotonic() + 5
        while self.pair.producer.record(handoff.ticket).state == "filling":  # type: ignore[union-attr]
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def teardown(self) -> None:
        try:
            self._settle()
        finally:
            self.pair.close()

    def _settle(self) -> None:
        for handoff in self.all.values():
            self.consumer.cancel(handoff.ticket.handoff)
            self.producer.abort(handoff.ticket.handoff)
        self.pair.quiet(20)
        self.collect()
        for name, handoff in self.all.items():
            ours, theirs = self.pair.producer.record(handoff.ticket), self.pair.consumer.record(handoff.ticket)
            assert (ours is not None) == handoff.opened
            assert (theirs is not None) == (handoff.loads > 0)
            assert ours is None or ours.state in ("drained", "aborted", "expired", "failed"), ours
            assert theirs is None or theirs.state in ("loaded", "failed"), theirs
            assert theirs is None or (theirs.state == "failed") == (theirs.reason is not None)
            assert len(handoff.outcomes) == handoff.loads  # one per claim, and only the first can have gone well
            good = [outcome for outcome in handoff.outcomes if outcome.reason is None]
            assert len(good) == (theirs is not None and theirs.state == "loaded"), name
        self.a_final_state_stays()
        ended = sum(self.pair.producer.endpoint._ledger.ended_by_state.values())
        assert ended == sum(handoff.opened for handoff in self.all.values())
        self._check_blocks()

    def _check_blocks(self) -> None:
        after = read(self.pair.consumer.cache, range(BLOCKS), 0, BLOCKS * 128)
        users: dict[int, list[Handoff]] = {}
        for handoff in self.all.values():
            users.setdefault(handoff.block, []).append(handoff)
        for block in range(BLOCKS):
            here = np.s_[:, :, :, block * 128 : (block + 1) * 128]
            got, old = after[here], self.before[here]
            if len(users.get(block, ())) > 1:
                continue
            may_change = np.zeros(128, bool)
            for handoff in users.get(block, ()):
                start, stop = handoff.range
                expected = read(self.pair.producer.cache, handoff.ours, 0, handoff.tokens)[:, :, :, start:stop]
                arrived = (got[:, :, :, start:stop] == expected).all(axis=(0, 1, 2, 4))
                kept = (got[:, :, :, start:stop] == old[:, :, :, start:stop]).all(axis=(0, 1, 2, 4))
                record = self.pair.consumer.record(handoff.ticket)
                if record is not None and record.state == "loaded":
                    assert arrived.all()
                else:  # some tiles may have been loaded before the end; whole, or not at all
                    assert (arrived | kept).all()
                may_change[start:stop] = True
            np.testing.assert_array_equal(got[:, :, :, ~may_change], old[:, :, :, ~may_change])


TestHandoffs = Handoffs.TestCase
TestHandoffs.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
