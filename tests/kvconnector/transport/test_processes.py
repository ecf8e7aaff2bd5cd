"""What only a second process can show: a peer that dies or stops in the middle."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable

import pytest
from loopback import Pair, Side, read, start_others
from processes import Child, child
from sockets import eventually

from deeplink.kvconnector.handoffs.handoff import Record
from deeplink.kvconnector.handoffs.ticket import Ticket, mint, new_handoff

SECRET = b"a secret for tests only, 32 byte"
TOKENS = 333
DEADLINE = 2.5
"""Seconds, where a test waits for it to pass: in less a busy machine might not get as far as it has to before."""
Make = Callable[..., Pair]

PRODUCER = """
    import sys, time
    from loopback import SECRET, VEC, make_side, start_others
    from deeplink.kvconnector.relayout import compiled
    from deeplink.kvconnector.handoffs.ticket import verify
    compiled.warm()  # no deadline is to pass over that
    side = make_side("prefill", VEC, 64, seed=1, others=start_others(sys.argv[1]))
    print(side.epoch, side.endpoint.contract.ranks[0].channel, flush=True)
    ticket = verify(sys.stdin.readline().strip(), SECRET)
    side.endpoint.producer.open(ticket, b"prompt", 333)
    side.endpoint.producer.fill(ticket.handoff, (range(6),), 200)
    print("filled", flush=True)
    time.sleep(120)
"""
CONSUMER = """
    import sys, time
    from loopback import HND, SECRET, make_side, start_others
    from deeplink.kvconnector.relayout import compiled
    from deeplink.kvconnector.handoffs.order import Order
    from deeplink.kvconnector.handoffs.ticket import verify
    compiled.warm()
    side = make_side("decode", HND, 128, seed=2, others=start_others(sys.argv[1]))
    print(side.epoch, flush=True)
    text = sys.stdin.readline().strip()
    ticket = verify(text, SECRET)
    side.endpoint.consumer.load(Order("request", ticket, text, b"prompt", 0, 333, (range(3),)))
    while not (outcomes := side.endpoint.consumer.collect()):
        time.sleep(0.01)
    reason = outcomes[0].reason
    print(reason.code if reason else "loaded", side.endpoint._incoming.used, flush=True)
    time.sleep(120)
"""


@pytest.fixture(params=["tcp", "shm"])
def agreed(request: pytest.FixtureRequest) -> str:
    """The transport that the two engines have in common and prefer."""
    return str(request.param)


def claim(pair: Pair, peer: Child, seconds: float) -> Ticket:
    """The consumer here has half of what the producer there holds."""
    epoch, channel = peer.line().split()
    ticket = Ticket(new_handoff(), epoch, pair.consumer.epoch, (channel,), int(seconds * 1000))
    text = mint(ticket, SECRET)
    pair.load(pair.order(ticket, text, [3, 1, 8], TOKENS))
    peer.tell(text)
    assert peer.line() == "filled"
    eventually(lambda: pair.consumer.endpoint.consumer._loads[ticket.handoff].tokens.get(0) == 192, 20)
    return ticket


def test_the_producer_is_killed(make: Make, agreed: str) -> None:
    pair = make(producer={"others": start_others(agreed)}, consumer={"others": start_others(agreed)})
    with child(PRODUCER, agreed) as peer:
        ticket = claim(pair, peer, 60)
        peer.signal(signal.SIGKILL)
        reason = pair.outcome().reason
    assert reason is not None
    assert reason.code == "peer_gone"
    _, lost = pair.settle(ticket, None, "failed")
    assert lost is not None
    assert lost.tokens == 192


def test_the_producer_stops_and_the_consumer_gives_up(make: Make, agreed: str) -> None:
    pair = make(producer={"others": start_others(agreed)}, consumer={"others": start_others(agreed)})
    with child(PRODUCER, agreed) as peer:
        ticket = claim(pair, peer, 60)
        peer.signal(signal.SIGSTOP)
        pair.consumer.endpoint.consumer.cancel(ticket.handoff)
        reason = pair.outcome().reason
        assert reason is not None
        assert reason.code == "aborted"
        pair.settle(ticket, None, "failed")


def test_the_producer_stops_for_good(make: Make, agreed: str) -> None:
    pair = make(producer={"others": start_others(agreed)}, consumer={"others": start_others(agreed)})
    with child(PRODUCER, agreed) as peer:
        ticket = claim(pair, peer, DEADLINE)
        peer.signal(signal.SIGSTOP)
        reason = pair.outcome(20).reason
        assert reason is not None
        assert reason.code == "deadline_exceeded"
        pair.settle(ticket, None, "failed")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_the_consumer_is_gone(make: Make, agreed: str, end: int) -> None:
    pair = make(producer={"others": start_others(agreed)}, consumer={"others": start_others(agreed)})
    ours: Side = pair.producer
    with child(CONSUMER, agreed) as peer:
        ticket = Ticket(new_handoff(), ours.epoch, peer.line(), (ours.endpoint.contract.ranks[0].channel,), 60_000)
        peer.tell(mint(ticket, SECRET))
        pair.open(ticket, TOKENS)
        pair.fill(ticket, range(6), 200)
        eventually(lambda: ours.endpoint.producer.claims == 1 and ours.endpoint._outgoing.used == 0, 20)
        peer.signal(end)
        pair.fill(ticket, range(6), TOKENS)
        if end == signal.SIGSTOP:  # the connection lives on, so it takes somebody to give up
            assert ours.endpoint.producer.settled(ticket.handoff)
            ours.endpoint.producer.abort(ticket.handoff)
        sent, _ = pair.settle(ticket, "failed" if end == signal.SIGKILL else "aborted", None)
        assert sent is not None
        assert sent.reason is not None
        assert sent.reason.code == ("peer_gone" if end == signal.SIGKILL else "aborted")


# -- frozen: its connections live on, it neither reads nor writes, and it may wake at any time -----------------


def served(pair: Pair, peer: Child, seconds: float) -> tuple[Ticket, float]:
    """The consumer there has claimed and loaded 192 tokens; more is staged when it is frozen. And when time is up."""
    ours = pair.producer
    channels = (ours.endpoint.contract.ranks[0].channel,)
    ticket = Ticket(new_handoff(), ours.epoch, peer.line(), channels, int(seconds * 1000))
    peer.tell(mint(ticket, SECRET))
    pair.open(ticket, TOKENS)
    until = time.monotonic() + seconds
    pair.fill(ticket, range(6), 200)
    eventually(lambda: ours.endpoint.producer.claims == 1 and ours.endpoint._outgoing.used == 0, 20)
    peer.signal(signal.SIGSTOP)
    pair.fill(ticket, range(6), TOKENS)
    return ticket, until


def ended(pair: Pair, ticket: Ticket, state: str, until: float) -> Record:
    """The producer's record, which is final and the last thing that is left, by then."""
    endpoint = pair.producer.endpoint
    eventually(lambda: endpoint._outgoing.used == endpoint._ledger.open == 0, until - time.monotonic())
    record = pair.producer.record(ticket)
    assert record is not None
    assert record.state == state
    assert endpoint.producer.claims == 0
    return record


def cut(side: Side) -> None:
    for sock in list(side.endpoint._listener._open):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def test_a_frozen_consumer_holds_staging_until_the_deadline_and_no_block(make: Make, agreed: str) -> None:
    pair = make(producer={"others": start_others(agreed)}, consumer={"others": start_others(agreed)})
    with child(CONSUMER, agreed) as peer:
        ticket, until = served(pair, peer, DEADLINE)
        assert pair.producer.endpoint.producer.settled(ticket.handoff)  # the engine has its blocks back
        assert pair.producer.endpoint._outgoing.used > 0
        record = ended(pair, ticket, "expired", until + 1)
        assert record.reason is not None
        assert record.reason.code == "deadline_exceeded"
        assert time.monotonic() >= until
        peer.signal(signal.SIGCONT)
        code, used = peer.line().split()
        assert code == "deadline_exceeded"
        assert used == "0"
        assert pair.producer.record(ticket) == record


def test_a_frozen_consumer_whose_link_is_cut_holds_nothing(make: Make, agreed: str) -> None:
    """Its claim could be gone on with, if it came back in time. It wakes later, and is told why it is over."""
    pair = make(producer={"others": start_others(agreed)}, consumer={"others": start_others(agreed)})
    with child(CONSUMER, agreed) as peer:
        ticket, _ = served(pair, peer, 60)
        cut(pair.producer)
        record = ended(pair, ticket, "failed", time.monotonic() + 10)
        late = pair.producer.endpoint._ledger.late
        peer.signal(signal.SIGCONT)
        assert peer.line().split() == ["peer_gone", "0"]
        assert pair.producer.record(ticket) == record
        assert pair.producer.endpoint._ledger.late > late


@pytest.mark.parametrize("link", ["alive", "cut"])
def test_a_frozen_producer_holds_nothing_past_the_deadline(make: Make, agreed: str, link: str) -> None:
    """And writes nothing when it wakes: by then the blocks are another request's."""
    pair = make(producer={"others": start_others(agreed)}, consumer={"others": start_others(agreed)})
    endpoint = pair.consumer.endpoint
    with child(PRODUCER, agreed) as peer:
        ticket = claim(pair, peer, DEADLINE)
        until = time.monotonic() + DEADLINE
        peer.signal(signal.SIGSTOP)
        if link == "cut":
            (load,) = endpoint.consumer._loads.values()
            for channel in list(load.channels):
                channel._shared._socket.shutdown(socket.SHUT_RDWR)
            eventually(lambda: endpoint._incoming.used == 0, 2)
        reason = pair.outcome(20).reason
        assert time.monotonic() < until + 2
        assert reason is not None
        assert reason.code == ("deadline_exceeded" if link == "alive" else "peer_gone")
        eventually(lambda: endpoint._incoming.used == 0, 2)
        for array in pair.consumer.cache.layers:
            array[...] = 7
        peer.signal(signal.SIGCONT)
        time.sleep(0.5)
        assert (read(pair.consumer.cache, range(24), 0, 24 * 128) == 7).all()
        pair.settle(ticket, None, "failed")
