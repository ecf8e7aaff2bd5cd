"""Races that were found by reading, each held open by hand."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from loopback import NHD, Gate, Pair
from sockets import InThread, eventually
from world import Engine, Shape, agree

from deeplink.errors import PeerGone
from deeplink.kvconnector.contracts.contract import CacheGroup
from deeplink.kvconnector.handoffs import channel as ch
from deeplink.kvconnector.handoffs import consumer as module
from deeplink.kvconnector.handoffs import offers as offers_module
from deeplink.kvconnector.handoffs import receive as receive_module
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.handoffs.pushing import Pushing
from deeplink.kvconnector.handoffs.receive import Receiving
from deeplink.kvconnector.handoffs.serve import Serving
from deeplink.kvconnector.handoffs.ticket import Ticket
from deeplink.kvconnector.transport.base import Link, Push
from deeplink.kvconnector.wires.pool import KEPT_PEERS, KEPT_PER_PEER, Pool

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
    address = pair.producer.endpoint.contract.ranks[0].channel
    kept: list[ch.Channel] = []
    # The engine goes on before the producer has said its last word on the channel.
    eventually(lambda: kept or kept.extend(filter(None, [consumer._channels.take(address)])))
    (channel,) = kept
    assert not channel.readable(0)  # raises when it was closed, is true when the peer left
    channel.close()


def test_a_load_does_not_wait_for_the_producers_last_word(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are in their blocks: the engine goes on, and the producer's account is right a little later."""
    leave, told = offers_module.Offers.leave, threading.Event()

    def late(*arguments: object) -> None:
        assert told.wait(10.0)
        leave(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(offers_module.Offers, "leave", late)
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    assert pair.outcome().reason is None
    consumer = pair.consumer.endpoint.consumer
    assert consumer.claims == 0
    consumer.cancel(ticket.handoff)  # too late: it has ended
    told.set()
    pair.settle(ticket, "drained", "loaded")
    eventually(lambda: not consumer._concluding)


def test_a_consumer_that_is_closed_does_not_wait_for_it_either(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    monkeypatch.setattr(offers_module.Offers, "leave", lambda *_: told.wait(10.0))
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    assert pair.outcome().reason is None
    consumer = pair.consumer.endpoint.consumer
    consumer.close()
    eventually(lambda: not consumer._concluding, 5.0)
    told.set()


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

    close = Pushing.close

    def trapped(pushing: Pushing, healthy: bool) -> None:
        producer.abort(ticket.handoff)
        close(pushing, healthy)

    monkeypatch.setattr(Pushing, "close", trapped)
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
    pair.producer.endpoint.producer.pump()  # it is claimed now, and has all the room
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
            assert theirs.state == "loaded"
            assert ours.state in ("drained", "expired")  # all had landed, and the time was up before it heard so
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


def test_a_claim_that_comes_back_at_the_last_moment_is_served_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time was over when the producer looked, and it was back when the producer acted on that."""
    monkeypatch.setattr(offers_module, "CLOSED_SECONDS", 0.0)
    offers = pair.producer.endpoint.producer._offers
    consumer = pair.consumer.endpoint.consumer
    looked, acted = threading.Event(), threading.Event()
    dial, give_up = consumer._dial, offers._give_up

    def late(offer, taking):  # type: ignore[no-untyped-def]
        looked.set()
        eventually(lambda: taking.channel is not None)
        give_up(offer, taking)
        acted.set()

    def patient(address: str, deadline: float):  # type: ignore[no-untyped-def]
        assert not count or looked.wait(10)
        return dial(address, deadline)

    def meddle(pushes):  # type: ignore[no-untyped-def]
        count.append(1)
        if len(count) == 3:
            for sock in list(pair.producer.endpoint._listener._open):
                sock.shutdown(2)
        if looked.is_set():  # on the old connection a push may still be under way, and must not wait for that
            assert acted.wait(10)
        return pushes

    count: list[int] = []
    monkeypatch.setattr(offers, "_give_up", late)
    monkeypatch.setattr(consumer, "_dial", patient)
    pair.producer.transport.meddle = meddle
    run(pair)
    assert acted.is_set()


def cut_channels(pair: Pair) -> None:
    for sock in list(pair.producer.endpoint._listener._open):
        sock.shutdown(2)


def ended_well(pair: Pair, ticket: Ticket) -> None:
    assert pair.outcome().reason is None
    sent, loaded = pair.settle(ticket, "drained", "loaded")
    assert sent is not None
    assert loaded is not None
    assert (sent.tokens, sent.kv_bytes, sent.digest) == (loaded.tokens, loaded.kv_bytes, loaded.digest)
    assert sent.tokens == TOKENS


def begin(pair: Pair, seconds: float = 10.0) -> Ticket:
    ticket, text = pair.ticket(seconds)
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    return ticket


def test_an_end_that_gets_lost_is_no_failure(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """All has landed and is verified; the producer has forgotten the handoff when the consumer comes back."""
    offers = pair.producer.endpoint.producer._offers
    leave = offers.leave

    def cutting(*arguments) -> None:  # type: ignore[no-untyped-def]
        leave(*arguments)
        cut_channels(pair)

    monkeypatch.setattr(offers, "leave", cutting)
    ended_well(pair, begin(pair))


def test_an_acknowledgement_that_gets_lost_is_counted_all_the_same(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk has landed, but the producer is not told before the connection breaks."""
    answer = Serving._answer
    cuts = []

    def cutting(serving: Serving, message: ch.Message) -> None:
        if isinstance(message, ch.Landed) and message.index == 10 and not cuts:
            cuts.append(message)
            cut_channels(pair)
            serving.channel.receive(time.monotonic() + 10)
        answer(serving, message)

    monkeypatch.setattr(Serving, "_answer", cutting)
    ended_well(pair, begin(pair))
    assert cuts


@pytest.mark.parametrize("breaks", [1, 3])
def test_a_chunk_is_counted_once_however_often_the_claim_breaks(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, breaks: int
) -> None:
    """The claim says what has landed of what was under way, and breaks again before anything else is."""
    recount = Serving._recount
    broken = []

    def breaking(serving: Serving) -> None:
        recount(serving)
        if serving.taking.resumed and len(broken) < breaks:
            broken.append(serving)
            cut_channels(pair)
            serving.channel.receive(time.monotonic() + 10)

    answer = Serving._answer

    def cutting(serving: Serving, message: ch.Message) -> None:
        if isinstance(message, ch.Landed) and message.index == 4 and not broken:
            cut_channels(pair)
            serving.channel.receive(time.monotonic() + 10)
        answer(serving, message)

    monkeypatch.setattr(Serving, "_recount", breaking)
    monkeypatch.setattr(Serving, "_answer", cutting)
    ended_well(pair, begin(pair))
    assert len(broken) == breaks


def test_a_producer_that_has_given_all_is_not_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It freezes before it says that this was the end; the deadline is a minute away."""
    monkeypatch.setattr(receive_module, "END_SECONDS", 0.2)
    offers = pair.producer.endpoint.producer._offers
    leave, thawed = offers.leave, threading.Event()

    def frozen(*arguments) -> None:  # type: ignore[no-untyped-def]
        assert thawed.wait(30)
        leave(*arguments)

    monkeypatch.setattr(offers, "leave", frozen)
    ticket = begin(pair, 60)
    assert pair.outcome(5).reason is None
    assert pair.consumer.endpoint._incoming.used == 0
    thawed.set()
    pair.settle(ticket, "drained", "loaded")


@pytest.mark.parametrize("connects", [True, False])
def test_an_abort_while_the_producer_connects_is_told_as_an_abort(pair: Pair, connects: bool) -> None:
    """Whoever ended the handoff could not close a link that was not there yet, and nothing may be pushed over it."""
    ticket, text = pair.ticket()
    real, pushed, links = pair.producer.transport.connect, [], []

    def connect(address: str, deadline: float) -> Link:
        pair.producer.endpoint.producer.abort(ticket.handoff)
        if not connects:
            raise PeerGone("nobody there")
        links.append(real(address, deadline))
        return links[0]

    def meddle(pushes):  # type: ignore[no-untyped-def]
        pushed.append(pushes)
        return pushes

    pair.producer.transport.connect = connect  # type: ignore[method-assign]
    pair.producer.transport.meddle = meddle
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    reason = pair.outcome().reason
    assert reason is not None
    assert reason.code == "aborted"
    pair.settle(ticket, "aborted", "failed")
    assert not pushed
    for link in links:
        with pytest.raises(PeerGone):
            link.push([Push(memoryview(b"x"), bytes(16), 0)], time.monotonic() + 5)


@pytest.mark.parametrize("place", [0, 1])
def test_a_bug_in_one_of_two_sources_is_not_a_load(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """Its thread dies; half of the heads never come, and nobody says so."""
    spec = CacheGroup("full", (0, 1, 2), 4, 16, "bfloat16", 16, NHD)
    a, b = Engine.start(Shape((spec,), 2), "prefill", 1), Engine.start(Shape((spec,)), "decode", 2)
    try:
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        real = Receiving.run
        address = a.contract.ranks[place].channel

        def run(receiving: Receiving, *, kept: bool) -> None:
            if receiving.address == address:
                raise ValueError("a bug")
            real(receiving, kept=kept)

        monkeypatch.setattr(Receiving, "run", run)
        agreement = agree(a.contract, b.contract)
        ticket = tickets.issue(tickets.new_handoff(), a.contract, b.contract, agreement, 20_000)
        a.open(ticket, 101)
        b.load(ticket, [[3, 1, 8, 6, 2, 12, 4]], 0, 101)
        a.fill(ticket, [[5, 2, 9, 0, 7, 11, 3]], 101)
        (outcome,) = b.ended()
        assert outcome.reason is not None
        assert "unexpectedly" in outcome.reason.message
        b.quiet()
        assert b.states(ticket) == ["failed"]
        for endpoint in a.endpoints:  # some may not have been claimed at all
            endpoint.producer.abort(ticket.handoff)
        a.quiet()
        eventually(lambda: not [thread for thread in threading.enumerate() if "deeplink-load" in thread.name])
    finally:
        a.close()
        b.close()


def test_notices_that_come_too_late_are_counted_and_change_nothing(pair: Pair) -> None:
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    assert pair.outcome().reason is None
    pair.settle(ticket, "drained", "loaded")
    ledgers = pair.producer.endpoint._ledger, pair.consumer.endpoint._ledger
    assert [ledger.late for ledger in ledgers] == [0, 0]
    pair.producer.endpoint.producer.abort(ticket.handoff)
    pair.consumer.endpoint.consumer.cancel(ticket.handoff)
    pair.producer.endpoint.producer.abort("never heard of")
    pair.settle(ticket, "drained", "loaded")
    assert [ledger.late for ledger in ledgers] == [1, 1]
    assert not ledgers[0].end(ticket.handoff, "failed")
    assert ledgers[0].late == 2


def test_connections_to_peers_that_never_come_back_are_not_kept_for_ever() -> None:
    """Each restart of a peer leaves what was kept for its old address, which nobody takes any more."""

    class Kept:
        closed = False

        def close(self) -> None:
            self.closed = True

    pool: Pool[Kept] = Pool()
    made = [Kept() for _ in range(KEPT_PEERS + 10)]
    for address, connection in enumerate(made):
        pool.give(address, connection)
        pool.give("lives on", pool.take("lives on") or Kept())
    assert sum(not connection.closed for connection in made) == KEPT_PEERS - 1
    assert not made[-1].closed
    kept = pool.take("lives on")
    assert kept is not None
    assert not kept.closed
    assert pool.take("lives on") is None
    pool.close()
    assert all(connection.closed for connection in made)
