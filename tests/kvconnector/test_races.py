"""Races that were found by reading, each held open by hand."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from loopback import Gate, Pair
from wires import InThread, eventually

from deeplink.errors import PeerGone
from deeplink.kvconnector import consumer as module
from deeplink.kvconnector.pool import KEPT_PER_PEER, Pool
from deeplink.kvconnector.serve import Serving
from deeplink.kvconnector.transport.base import Link

TOKENS = 333
OURS, THEIRS = [5, 2, 9, 0, 7, 11], [3, 1, 8]
Make = Callable[..., Pair]


def run(pair: Pair) -> None:
    pair.hand_over(TOKENS, OURS, THEIRS)


def test_a_cancel_at_the_very_end_leaves_the_kept_channel_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load has seen that it is not cancelled and is about to keep its channel: now the cancel comes."""
    consumer = pair.consumer.endpoint.consumer
    slot = module.Load.cancelled
    cancels = []

    class Trapped(module.Load):
        __slots__ = ()

        @property
        def cancelled(self) -> bool:
            value: bool = slot.__get__(self)  # type: ignore[attr-defined]
            if sum(self.tokens.values()) == TOKENS and not cancels:
                cancels.append(InThread(lambda: consumer.cancel(self.order.ticket.handoff)))
                with contextlib.suppress(AssertionError):  # it may have to wait for us
                    cancels[0].join(0.3)
            return value

        @cancelled.setter
        def cancelled(self, value: bool) -> None:
            slot.__set__(self, value)  # type: ignore[attr-defined]

    monkeypatch.setattr(module, "Load", Trapped)
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    reason = pair.outcome().reason  # the cancel and the end of the load are equally fast
    assert reason is None or reason.code == "aborted"
    cancels[0].join()
    pair.settle(ticket, "drained", "loaded" if reason is None else "failed")
    channel = consumer._channels.take(pair.producer.endpoint.contract.ranks[0].channel)
    assert channel is not None
    assert not channel.readable(0)  # raises when it was closed, is true when the peer left
    channel.close()


def test_a_farewell_counts_although_the_peers_transport_is_gone(pair: Pair) -> None:
    """The consumer shuts down while the producer connects to it: given up, not failed."""
    ticket, text = pair.ticket()

    def connect(address: str, deadline: float) -> Link:
        pair.consumer.endpoint.consumer.cancel(ticket.handoff)
        raise PeerGone("the peer closed the connection")

    pair.producer.transport.connect = connect  # type: ignore[method-assign]
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    reason = pair.outcome().reason
    assert reason is not None
    assert reason.code == "aborted"
    pair.settle(ticket, "aborted", "failed")


def test_a_link_is_not_kept_when_the_handoff_ends_at_that_moment(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends a handoff closes the links it finds there; one of those must not go to the pool."""
    producer = pair.producer.endpoint.producer
    ticket, text = pair.ticket()

    detach = Serving._detach

    def trapped(serving: Serving, healthy: bool) -> None:
        producer.abort(ticket.handoff)
        detach(serving, healthy)

    monkeypatch.setattr(Serving, "_detach", trapped)
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    assert pair.outcome().reason is None  # all had landed
    pair.settle(ticket, "aborted", "loaded")
    assert producer._links.take(("tcp", pair.consumer.transport.address)) is None
    monkeypatch.undo()
    run(pair)


def test_a_link_of_an_ended_handoff_is_not_kept(make: Make) -> None:
    """Ended while its last push was under way: the link was closed, so nobody may get it."""
    pair = make(producer={"chunk": 1 << 20})
    gate = Gate()
    pair.producer.transport.meddle = gate
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    assert gate.reached.wait(10)
    pair.producer.endpoint.producer.abort(ticket.handoff)
    gate.open()
    assert pair.outcome().reason is not None
    pair.settle(ticket, "aborted", "failed")
    assert pair.producer.endpoint.producer._links.take(("tcp", pair.consumer.transport.address)) is None
    pair.producer.transport.meddle = lambda pushes: pushes
    run(pair)


def test_staging_that_is_being_read_is_not_given_to_others(make: Make) -> None:
    """The handoff ends during a push; its piece stays its own until the push has returned."""
    tile = 16 * 1536
    pair = make(producer={"staging": 2 * tile, "chunk": tile})
    staging = pair.producer.endpoint._outgoing
    gate = Gate()
    pair.producer.transport.meddle = gate
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    assert gate.reached.wait(10)
    assert staging.used == 2 * tile
    pair.producer.endpoint.producer.abort(ticket.handoff)
    assert staging.used == tile
    assert staging.try_allocate(2 * tile) is None
    gate.open()
    pair.outcome()
    pair.settle(ticket, "aborted", "failed")


def test_two_claims_read_one_piece_while_the_handoff_ends(make: Make) -> None:
    pair = make(producer={"chunk": 1 << 20})
    other = Pair(pair.producer, make(consumer={"epoch": pair.consumer.epoch}).consumer)
    gates = [Gate(), Gate()]
    unused = iter(gates)
    lock = threading.Lock()

    def meddle(pushes):  # type: ignore[no-untyped-def]
        with lock:
            gate = next(unused)
        return gate(pushes)

    pair.producer.transport.meddle = meddle
    ticket, text = pair.ticket(30, claims=2)
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    other.load(other.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    for gate in gates:
        assert gate.reached.wait(10)
    (staged,) = pair.producer.endpoint.producer._offers._open[ticket.handoff].staged
    pair.producer.endpoint.producer.abort(ticket.handoff)
    used = pair.producer.endpoint._outgoing.used
    assert used > 0
    gates[0].open()
    eventually(lambda: staged.readers == 1)
    assert pair.producer.endpoint._outgoing.used == used
    gates[1].open()
    for side in (pair, other):
        reason = side.outcome().reason
        assert reason is not None
        assert reason.code == "aborted"
        side.settle(ticket, "aborted", "failed")


@pytest.mark.parametrize("seconds", [0.02, 0.04, 0.06, 0.08])
def test_the_deadline_in_the_middle_of_everything(make: Make, seconds: float) -> None:
    pair = make(producer={"chunk": 1, "staging": 3 * 16 * 1536})
    for _ in range(5):
        ticket, text = pair.ticket(seconds)
        pair.open(ticket, TOKENS)
        pair.load(pair.order(ticket, text, THEIRS, TOKENS))
        for computed in range(0, TOKENS, 20):
            pair.fill(ticket, OURS, computed)
        pair.fill(ticket, OURS, TOKENS)
        pair.pump(ticket)
        reason = pair.outcome().reason
        pair.quiet()
        ours, theirs = pair.producer.record(ticket), pair.consumer.record(ticket)
        assert ours is not None
        assert theirs is not None
        if reason is None:
            assert (ours.state, theirs.state) == ("drained", "loaded")
        else:
            assert reason.code == "deadline_exceeded"
            assert theirs.state == "failed"
            assert ours.state in ("expired", "drained")
    run(pair)


def test_many_threads_give_up_many_handoffs(make: Make) -> None:
    """Abort, cancel and expiry from everywhere at once; each handoff ends once and nothing is held."""
    tile = 16 * 1536
    pair = make(producer={"staging": 6 * tile, "chunk": tile}, consumer={"staging": 4 * tile})
    tickets = []
    for index in range(24):
        ticket, text = pair.ticket(1.0 + (index % 5) * 0.1)
        pair.open(ticket, 60)
        pair.load(pair.order(ticket, text, [index], 60))
        pair.fill(ticket, [index], 60)
        tickets.append(ticket)

    def give_up(which: int) -> None:
        for ticket in tickets[which::4]:
            if which % 2:
                pair.producer.endpoint.producer.abort(ticket.handoff)
            else:
                pair.consumer.endpoint.consumer.cancel(ticket.handoff)

    threads = [InThread(lambda which=which: give_up(which)) for which in range(2)]  # type: ignore[misc]
    for ticket in tickets:
        pair.pump(ticket)
    for thread in threads:
        thread.join()
    outcomes = [pair.one(20) for _ in tickets]
    assert {outcome.order.ticket.handoff for outcome in outcomes} == {ticket.handoff for ticket in tickets}
    pair.quiet()
    for outcome in outcomes:
        record = pair.consumer.record(outcome.order.ticket)
        assert record is not None
        assert (record.state, record.reason) == ("loaded" if outcome.reason is None else "failed", outcome.reason)
    assert sum(pair.producer.endpoint._ledger.ended_by_state.values()) == 24
    run(pair)


def test_a_cancel_wakes_a_load_whatever_else_is_going_on(make: Make) -> None:
    """Sockets are opened and closed all the time, and descriptors have few numbers."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        pair = make()
        consumer, producer = pair.consumer.endpoint.consumer, pair.producer.endpoint.producer
        tickets = []
        for index in range(rng.integers(1, 6)):
            ticket, text = pair.ticket(60)
            tickets.append(ticket)
            pair.load(pair.order(ticket, text, [index], 90))
            time.sleep(rng.choice([0, 0.0005, 0.001, 0.002]))
            consumer.cancel(tickets[rng.integers(0, index + 1)].handoff)
            if rng.integers(0, 2):
                pair.open(ticket, 100)
        for ticket in tickets:
            consumer.cancel(ticket.handoff)
            producer.abort(ticket.handoff)
        for _ in tickets:
            assert pair.one().reason is not None
        pair.quiet()
        pair.close()


class _Connection:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_the_pool() -> None:
    pool: Pool[_Connection] = Pool()
    assert pool.take("a") is None
    many = [_Connection() for _ in range(KEPT_PER_PEER + 2)]
    for connection in many:
        pool.give("a", connection)
    assert [connection.closed for connection in many] == [False] * KEPT_PER_PEER + [True] * 2
    assert pool.take("b") is None
    assert pool.take("a") is many[KEPT_PER_PEER - 1]
    pool.give("b", other := _Connection())
    pool.drop("a")
    assert all(connection.closed for connection in many[: KEPT_PER_PEER - 1])
    assert not other.closed
    pool.close()
    assert other.closed
    pool.give("a", late := _Connection())
    assert late.closed
    assert pool.take("a") is None
