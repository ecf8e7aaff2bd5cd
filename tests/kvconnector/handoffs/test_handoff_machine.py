"""Any order of claims, steps of prefill, preemptions, cut links, crashes, forged tickets, aborts and late notices.

Hypothesis chooses the order; the sockets and threads are real. A prefill engine of two ranks and two cache groups
serves up to three decode engines. Every prompt has bytes of its own, and a block is overwritten the moment its engine
could give it to somebody else: so whatever is read or written too late shows up as bytes that no prompt has, or that a
block should not have any more.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from loopback import HND, NHD, SECRET, Meddling
from world import Engine, Shape, agree, read

from deeplink.errors import TicketRefused
from deeplink.kvconnector.caches.group import Group
from deeplink.kvconnector.contracts.contract import CacheGroup
from deeplink.kvconnector.handoffs import offers as offers_module
from deeplink.kvconnector.handoffs import receive as receive_module
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.handoffs.handoff import FINAL
from deeplink.kvconnector.handoffs.landing import Landings
from deeplink.kvconnector.handoffs.order import Order, Outcome
from deeplink.kvconnector.handoffs.ticket import Ticket
from deeplink.kvconnector.relayout.plan import Chunk
from deeplink.kvconnector.transport.base import Push

HEADS, DIM, WINDOW = 2, 8, 40
OURS = (
    CacheGroup("full", (0, 2), HEADS, DIM, "bfloat16", 16, NHD),
    CacheGroup("sliding", (1,), HEADS, DIM, "bfloat16", 16, NHD, window=WINDOW),
)
THEIRS = (
    CacheGroup("full", (0, 2), HEADS, DIM, "bfloat16", 32, HND),
    CacheGroup("sliding", (1,), HEADS, DIM, "bfloat16", 32, HND, window=WINDOW),
)
TILE = 16 * 2 * 2 * DIM * 2
"""Bytes of a tile of the larger group, as one rank of the prefill engine stages it."""
MOST = 110
SHORT = 0.03
CONSUMERS = 3
SELDOM = st.sampled_from([False, False, False, True])
REUSED = 0xDEAD
"""What the engine's other requests write."""


@dataclass
class Handoff:
    ticket: Ticket
    text: str
    tokens: int
    values: list[np.ndarray]
    """What each cache group holds for this prompt, ``[layer, kv, head, token, dim]``."""
    stop: int
    """Up to where consumers load it: all of it, or all but the last token."""
    opened: Engine | None = None
    given_up: Engine | None = None
    """By whom, before it was opened: it will not be."""
    table: list[int] = field(default_factory=list)
    computed: int = 0
    done: bool = False
    """Prefill has ended, so the blocks go back once they are settled."""


@dataclass
class Loading:
    """One order, to consumer number `at`, which was incarnation `engine`."""

    handoff: Handoff
    at: int
    engine: Engine
    table: list[int]
    start: int
    honest: bool
    outcomes: list[Outcome] = field(default_factory=list)


def overwrite(groups: tuple[Group, ...], table: list[int]) -> None:
    for group in groups:
        stop = len(table) * group.spec.block_size
        wire = np.full(group.values.wire_shape(stop), REUSED, group.values.dtype)
        group.values.scatter(wire, 0, table, Chunk(0, stop))


def cut(listener: Any) -> None:
    for sock in list(listener._open):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


class Trap:
    """Springs once, after some calls."""

    def __init__(self, passes: int, spring: Callable[[], None]) -> None:
        self._left = passes
        self._spring = spring

    def __call__(self) -> None:
        self._left -= 1
        if self._left == -1:
            self._spring()


class Handoffs(RuleBasedStateMachine):
    handoffs = Bundle("handoffs")

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(offers_module, "CLOSED_SECONDS", 0.3)
        self.patch.setattr(receive_module, "END_SECONDS", 0.5)
        self.producer = self._start_producer()
        self.epoch = f"decode-{tickets.new_handoff()}"
        self.consumers = [self._start_consumer() for _ in range(CONSUMERS)]
        self.engines = [self.producer, *self.consumers]
        self.gone: set[int] = set()
        self.free = list(range(24))
        self.theirs = [list(range(24)) for _ in range(CONSUMERS)]
        self.all: dict[str, Handoff] = {}
        self.loads: dict[str, Loading] = {}
        self.final: dict[tuple[str, int, str], str] = {}
        self.lock = threading.RLock()
        """Guards the consumers' blocks: traps give them to others too."""
        self.problems: list[object] = []
        self.landing: Callable[[], None] = Trap(0, lambda: None)
        verified = Landings._verified

        def trapped(landings: Landings, *arguments: Any) -> int:
            found = verified(landings, *arguments)
            self.landing()
            return found

        self.patch.setattr(Landings, "_verified", trapped)

    def _start_producer(self) -> Engine:
        shape = Shape(OURS, tp=2)
        made = Engine.start(shape, "prefill", 1, staging=3 * TILE, chunk=TILE, transport=Meddling)
        for groups in made.held:
            overwrite(groups, list(range(24)))
        return made

    def _start_consumer(self) -> Engine:
        made = Engine.start(Shape(THEIRS), "decode", 2, staging=4 * TILE, epoch=self.epoch)
        overwrite(made.held[0], list(range(24)))
        return made

    # -- prefill ---------------------------------------------------------------------------------------------

    @rule(
        target=handoffs,
        tokens=st.integers(1, MOST),
        short=st.sampled_from([False, False, False, True]),
        claims=st.integers(1, CONSUMERS),
        less=st.booleans(),
    )
    def mint(self, tokens: int, short: bool, claims: int, less: bool) -> Handoff:
        agreement = agree(self.producer.contract, self.consumers[0].contract)
        milliseconds = int((SHORT if short else 60) * 1000)
        contracts = self.producer.contract, self.consumers[0].contract
        ticket = tickets.issue(tickets.new_handoff(), *contracts, agreement, milliseconds, claims)
        rng = np.random.default_rng(len(self.all))
        shapes = [(len(group.layers), 2, HEADS, tokens, DIM) for group in OURS]
        values = [rng.integers(0, 0x7000, shape).astype(np.uint16) for shape in shapes]
        handoff = Handoff(ticket, tickets.mint(ticket, SECRET), tokens, values, tokens - (less and tokens > 1))
        self.all[ticket.handoff] = handoff
        return handoff

    @rule(handoff=handoffs)
    def open(self, handoff: Handoff) -> None:
        ours = handoff.ticket.producer == self.producer.contract.epoch
        if handoff.opened is None and ours and handoff.given_up is not self.producer:
            self.producer.open(handoff.ticket, handoff.tokens)
            handoff.opened = self.producer
            return
        for endpoint in self.producer.endpoints:  # opened or given up before, or for the engine's former self
            with pytest.raises(TicketRefused):
                endpoint.producer.open(handoff.ticket, b"prompt", handoff.tokens)

    @rule(handoff=handoffs, more=st.integers(1, MOST))
    def compute(self, handoff: Handoff, more: int) -> None:
        if handoff.opened is not self.producer or handoff.done:
            return
        need = -(-handoff.tokens // 16)
        if not handoff.table:
            if len(self.free) < need:
                return
            handoff.table, self.free = self.free[:need], self.free[need:]
        start, stop = handoff.computed, min(handoff.tokens, handoff.computed + more)
        for rank, groups in enumerate(self.producer.held):
            for group, values in zip(groups, handoff.values, strict=True):
                wire = np.ascontiguousarray(values[:, :, rank : rank + 1, start:stop])
                group.values.scatter(wire, start, handoff.table, Chunk(start, stop))
        handoff.computed = stop
        self.producer.fill(handoff.ticket, [handoff.table] * 2, stop)
        handoff.done = stop == handoff.tokens
        self._reuse()

    @rule(handoff=handoffs)
    def compute_all(self, handoff: Handoff) -> None:
        self.compute(handoff, handoff.tokens)

    @rule(handoff=handoffs)
    def preempt(self, handoff: Handoff) -> None:
        """Its blocks are taken for another request; prefill starts over later."""
        if handoff.opened is self.producer and not handoff.done and handoff.table:
            for endpoint in self.producer.endpoints:
                endpoint.producer.lose(handoff.ticket.handoff)
            handoff.computed = 0
            self._free(handoff)
            self.pump()

    @rule()
    def pump(self) -> None:
        for endpoint in self.producer.endpoints:
            endpoint.producer.pump()
        self._reuse()

    @rule(handoff=handoffs, really=SELDOM)
    def abort(self, handoff: Handoff, really: bool) -> None:
        if not really:
            return
        for endpoint in self.producer.endpoints:
            endpoint.producer.abort(handoff.ticket.handoff)
        if handoff.opened is None:
            handoff.given_up = self.producer
        handoff.done = True
        self._reuse()

    def _reuse(self) -> None:
        """What the engine does after each step: blocks of requests that have ended go to others."""
        for handoff in self.all.values():
            if handoff.done and handoff.table and self._settled(handoff):
                self._free(handoff)

    def _settled(self, handoff: Handoff) -> bool:
        return all(endpoint.producer.settled(handoff.ticket.handoff) for endpoint in self.producer.endpoints)

    def _free(self, handoff: Handoff) -> None:
        for groups in self.producer.held:
            overwrite(groups, handoff.table)
        self.free += handoff.table
        handoff.table = []

    # -- decode ----------------------------------------------------------------------------------------------

    @rule(
        handoff=handoffs,
        at=st.integers(0, CONSUMERS - 1),
        share=st.sampled_from([0.0, 0.0, 0.0, 0.5, 1.0]),
        lie=st.sampled_from(["", "", "", "", "forged ticket", "another prompt"]),
    )
    def load(self, handoff: Handoff, at: int, share: float, lie: str) -> None:
        start = int(handoff.stop * share)
        with self.lock:
            table = self.theirs[at][: -(-handoff.stop // 32)]
            if len(table) * 32 < handoff.stop:
                return
            self.theirs[at] = self.theirs[at][len(table) :]
        name = f"request {len(self.loads)}"
        text = (
            tickets.mint(handoff.ticket, b"another secret, of 32 characters")
            if lie == "forged ticket"
            else handoff.text
        )
        prompt = b"another" if lie == "another prompt" else b"prompt"
        order = Order(name, handoff.ticket, text, prompt, start, handoff.stop, [table] * 2)
        self.loads[name] = Loading(handoff, at, self.consumers[at], table, start, not lie)
        self.consumers[at].endpoints[0].consumer.load(order)

    @rule(handoff=handoffs)
    def load_everywhere(self, handoff: Handoff) -> None:
        for at in range(handoff.ticket.claims):
            self.load(handoff, at, 0.0, "")

    @rule(handoff=handoffs, at=st.integers(0, CONSUMERS - 1), really=SELDOM)
    def cancel(self, handoff: Handoff, at: int, really: bool) -> None:
        if not really:
            return
        self.consumers[at].endpoints[0].consumer.cancel(handoff.ticket.handoff)
        self._collect(at)

    @rule(at=st.integers(0, CONSUMERS - 1))
    def collect(self, at: int) -> None:
        self._collect(at)

    def _collect(self, at: int) -> None:
        with self.lock:
            for outcome in self.consumers[at].endpoints[0].consumer.collect():
                loading = self.loads[outcome.order.request]
                loading.outcomes.append(outcome)
                assert loading.honest or outcome.reason is not None
                self._check(loading, loaded=outcome.reason is None)
                overwrite(loading.engine.held[0], loading.table)
                self.theirs[at] += loading.table

    def _check(self, loading: Loading, *, loaded: bool) -> None:
        """What was asked for is there, all of it or in parts; around it nothing has changed."""
        handoff, groups = loading.handoff, loading.engine.held[0]
        for index, group in enumerate(groups):
            got = read(groups, index, loading.table, 0, len(loading.table) * 32)
            start, stop = group.wanted(loading.start, handoff.stop)
            expected = handoff.values[index][:, :, :, start:stop]
            arrived = got[:, :, :, start:stop] == expected
            assert (arrived if loaded else arrived | (got[:, :, :, start:stop] == REUSED)).all()
            assert (got[:, :, :, :start] == REUSED).all()
            assert (got[:, :, :, stop:] == REUSED).all()

    # -- all of it -------------------------------------------------------------------------------------------

    @rule(
        target=handoffs,
        tokens=st.integers(1, MOST),
        claims=st.integers(1, CONSUMERS),
        less=st.booleans(),
        part=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
        claimed=st.sampled_from([True, True, False]),
        preempted=SELDOM,
    )
    def begin(self, tokens: int, claims: int, less: bool, part: float, claimed: bool, preempted: bool) -> Handoff:
        handoff = self.mint(tokens, False, claims, less)
        self.open(handoff)
        if claimed:
            self.load_everywhere(handoff)
        if part:
            self.compute(handoff, max(1, int(tokens * part)))
        if preempted:
            self.preempt(handoff)
        return handoff

    @rule(
        target=handoffs,
        tokens=st.integers(40, MOST),
        claims=st.integers(1, CONSUMERS),
        less=st.booleans(),
        part=st.sampled_from([0.3, 0.7, 1.0]),
        rank=st.integers(0, 1),
        at=st.integers(0, CONSUMERS - 1),
        passes=st.integers(0, 6),
        what=st.sampled_from(["channel", "link", "both", "abort", "abort all", "cancel", "landing", "preempt"]),
    )
    def incident(
        self, tokens: int, claims: int, less: bool, part: float, rank: int, at: int, passes: int, what: str
    ) -> Handoff:
        """Something happens in the middle of a handoff that would have ended well."""
        handoff = self.begin(tokens, claims, less, 0.0, False, False)
        if what == "landing":
            self.trap_landing(handoff, at, passes)
        elif what != "preempt":
            self.trap(handoff, rank, at, passes, what)
        if passes % 2:
            self.load_everywhere(handoff)
        self.compute(handoff, max(1, int(tokens * part)))
        if what == "preempt":
            self.preempt(handoff)
        if not passes % 2:
            self.load_everywhere(handoff)
        if what == "preempt":
            for _ in range(5):  # meanwhile the engine serves others, and the consumers make room
                self.pump()
                time.sleep(0.002)
        self.finish(handoff)
        return handoff

    @rule(handoff=handoffs)
    def finish(self, handoff: Handoff) -> None:
        """As an engine with nothing else to do would, for a while."""
        self.compute_all(handoff)
        deadline = time.monotonic() + 0.4
        name = handoff.ticket.handoff
        while time.monotonic() < deadline and (
            handoff.table or any(name in engine.endpoints[0].consumer._loads for engine in self.consumers)
        ):
            self.pump()
            time.sleep(0.002)
        for at in range(CONSUMERS):
            self._collect(at)

    # -- links and engines -----------------------------------------------------------------------------------

    @rule(
        handoff=handoffs,
        rank=st.integers(0, 1),
        at=st.integers(0, CONSUMERS - 1),
        passes=st.integers(0, 6),
        what=st.sampled_from(["channel", "link", "both", "abort", "abort all", "cancel"]),
    )
    def trap(self, handoff: Handoff, rank: int, at: int, passes: int, what: str) -> None:
        """In the middle of a push, some pushes from now."""
        endpoint = self.producer.endpoints[rank]

        def spring() -> None:
            if what in ("channel", "both"):
                cut(endpoint._listener)
            if what in ("link", "both"):
                self.cut_link(at)
            if what in ("abort", "abort all"):
                # One that is not open would be given up for this rank alone, which no engine does.
                for name, other in list(self.all.items()):
                    if other.opened is not None and (other is handoff or what == "abort all"):
                        endpoint.producer.abort(name)
            if what == "cancel":
                self.consumers[at].endpoints[0].consumer.cancel(handoff.ticket.handoff)
            if endpoint._outgoing.used == 0:
                self.problems.append("a piece is free that is being read")

        transport = endpoint.transports.running["tcp"]
        assert isinstance(transport, Meddling)
        trap = Trap(passes, spring)

        def meddle(pushes: Sequence[Push]) -> Sequence[Push]:
            trap()
            return pushes

        transport.meddle = meddle

    @rule(handoff=handoffs, at=st.integers(0, CONSUMERS - 1), passes=st.integers(0, 6))
    def trap_landing(self, handoff: Handoff, at: int, passes: int) -> None:
        """The load is given up between a chunk's verification and its writing, and the blocks go to others at once."""

        def spring() -> None:
            self.consumers[at].endpoints[0].consumer.cancel(handoff.ticket.handoff)
            try:
                self._collect(at)
            except AssertionError as exc:
                self.problems.append(exc)

        self.landing = Trap(passes, spring)

    @rule(rank=st.integers(0, 1))
    def cut_channel(self, rank: int) -> None:
        cut(self.producer.endpoints[rank]._listener)

    @rule(at=st.integers(0, CONSUMERS - 1))
    def cut_link(self, at: int) -> None:
        cut(self.consumers[at].endpoints[0].transports.running["tcp"]._listener)  # type: ignore[attr-defined]

    @rule(really=st.sampled_from([False] * 7 + [True]))
    def crash_producer(self, really: bool) -> None:
        """Without a word to anyone. It comes back as another, and knows nothing of what was."""
        if not really:
            return
        for endpoint in self.producer.endpoints:
            endpoint._listener.close()
            endpoint.transports.close()
        self.producer.close()
        self.producer = self._start_producer()
        self.engines.append(self.producer)
        self.free = list(range(24))
        for handoff in self.all.values():
            handoff.table = []

    @rule(at=st.integers(0, CONSUMERS - 1), really=SELDOM)
    def crash_consumer(self, at: int, really: bool) -> None:
        """Under the epoch that its tickets name, so that the producer cannot tell it from a claim of somebody else."""
        if not really:
            return
        (endpoint,) = self.consumers[at].endpoints
        endpoint.transports.close()
        for load in list(endpoint.consumer._loads.values()):
            for channel in list(load.channels):
                channel.close()
        endpoint.close()
        self._collect(at)
        self.consumers[at] = self._start_consumer()
        self.engines.append(self.consumers[at])
        self.theirs[at] = list(range(24))

    @rule(seconds=st.sampled_from([0.001, 0.005, SHORT]))
    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    # -- what holds at any time ------------------------------------------------------------------------------

    @invariant()
    def staging_is_bounded(self) -> None:
        for engine in self.engines:
            for endpoint in engine.endpoints:
                for staging in (endpoint._outgoing, endpoint._incoming):
                    assert 0 <= staging.used <= staging.capacity
                assert endpoint.producer.claims >= 0

    @invariant()
    def a_final_state_stays(self) -> None:
        for key, record in self._records():
            if record is not None and record.state in FINAL:
                assert self.final.setdefault(key, record.state) == record.state

    @invariant()
    def blocks_that_are_needed_are_kept(self) -> None:
        """Settled means: all is staged, or the handoff is over. The engine counts on it."""
        for handoff in self.all.values():
            if handoff.opened is self.producer and self._settled(handoff):
                for endpoint in self.producer.endpoints:
                    record = endpoint._ledger.get(handoff.ticket.handoff)
                    assert record is not None
                    assert record.state in FINAL or record.state == "staged" or handoff.tokens == 0

    def _records(self) -> Iterator[tuple[tuple[str, int, str], Any]]:
        for number, engine in enumerate(self.engines):
            for rank, endpoint in enumerate(engine.endpoints):
                for name in self.all:
                    yield (str(number), rank, name), endpoint._ledger.get(name)

    # -- what holds in the end -------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            self._finish()
            self._expired()
            self._settle()
        finally:
            for engine in self.engines:
                engine.close()
            self.patch.undo()

    def _finish(self) -> None:
        """Half of what can still end well is given the time to."""
        some = [handoff for at, handoff in enumerate(self.all.values()) if at % 2 and handoff.opened is self.producer]
        for handoff in some:
            self.compute_all(handoff)
        deadline = time.monotonic() + 1.0
        names = {handoff.ticket.handoff for handoff in some}
        while time.monotonic() < deadline and any(
            names & set(engine.endpoints[0].consumer._loads) for engine in self.consumers
        ):
            self.pump()
            time.sleep(0.002)

    def _expired(self) -> None:
        """What had little time is over without anybody's help."""
        short = {name for name, handoff in self.all.items() if handoff.ticket.milliseconds < 1000}
        deadline = time.monotonic() + 10
        while open_ := [key for key, record in self._records() if record is not None and key[2] in short]:
            if not [key for key in open_ if key not in self.final and not self._is_final(key)]:
                break
            assert time.monotonic() < deadline, "held past its deadline"
            time.sleep(0.005)

    def _is_final(self, key: tuple[str, int, str]) -> bool:
        record = self.engines[int(key[0])].endpoints[key[1]]._ledger.get(key[2])
        return record is None or record.state in FINAL

    def _settle(self) -> None:
        for name in self.all:
            for engine in self.engines:
                for endpoint in engine.endpoints:
                    endpoint.consumer.cancel(name)
                    endpoint.producer.abort(name)
        for engine in self.engines:
            engine.quiet(20)
        for at in range(CONSUMERS):
            self._collect(at)
        for loading in self.loads.values():
            assert len(loading.outcomes) == 1
        assert not self.problems
        self.a_final_state_stays()
        for handoff in self.all.values():
            self._check_records(handoff)
        self._check_late()
        for engine in self.engines:
            if engine not in self.consumers:
                continue
            for index in range(2):  # every block has been given to others, and nobody has written to it since
                assert (read(engine.held[0], index, list(range(24)), 0, 24 * 32) == REUSED).all()

    def _check_records(self, handoff: Handoff) -> None:
        name = handoff.ticket.handoff
        good = [load for load in self.loads.values() if load.handoff is handoff and load.outcomes[0].reason is None]
        loaded = []
        for engine in self.engines:
            for endpoint in engine.endpoints:
                record = endpoint._ledger.get(name)
                if record is None:
                    continue
                assert record.state in FINAL
                assert (record.reason is None) == (record.state in ("drained", "loaded"))
                assert (record.side == "producer") == (engine is handoff.opened)
                if record.state == "loaded":
                    loaded.append(record)
        assert len(good) == len(loaded) <= handoff.ticket.claims
        if handoff.opened is None:
            assert not good
            return
        sent = [endpoint._ledger.get(name) for endpoint in handoff.opened.endpoints]
        if len(good) == handoff.ticket.claims and all(record.state == "drained" for record in sent):
            sums = [sum(int(record.digest or "0", 16) for record in side) % (1 << 64) for side in (sent, loaded)]
            assert sums[0] == sums[1]
            assert sum(record.kv_bytes for record in sent) == sum(record.kv_bytes for record in loaded)

    def _check_late(self) -> None:
        """Whatever is said after the end is counted and changes nothing."""
        for handoff in self.all.values():
            if handoff.opened is None:
                continue
            for endpoint in handoff.opened.endpoints:
                late = endpoint._ledger.late
                endpoint.producer.abort(handoff.ticket.handoff)
                endpoint.producer.fill(handoff.ticket.handoff, [[], []], handoff.tokens)
                assert endpoint._ledger.late == late + 1
        self.a_final_state_stays()


HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
TestHandoffs = Handoffs.TestCase
TestHandoffs.settings = settings(max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=HEALTH)


@pytest.mark.long
@pytest.mark.timeout(1800)
class TestManyHandoffs(Handoffs.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(max_examples=400, stateful_step_count=60, deadline=None, suppress_health_check=HEALTH)
