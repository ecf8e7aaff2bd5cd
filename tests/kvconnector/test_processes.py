"""What only a second process can show: a peer that dies or stops in the middle."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from loopback import Pair, Side, start_others
from processes import Child, child
from wires import eventually

from deeplink.kvconnector.ticket import Ticket, mint, new_handoff

SECRET = b"a secret for tests only, 32 byte"
TOKENS = 333
Make = Callable[..., Pair]

PRODUCER = """
    import sys, time
    from loopback import SECRET, VEC, make_side, start_others
    from deeplink.kvconnector.ticket import verify
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
    from deeplink.kvconnector.order import Order
    from deeplink.kvconnector.ticket import verify
    side = make_side("decode", HND, 128, seed=2, others=start_others(sys.argv[1]))
    print(side.epoch, flush=True)
    text = sys.stdin.readline().strip()
    ticket = verify(text, SECRET)
    side.endpoint.consumer.load(Order("request", ticket, text, b"prompt", 0, 333, (range(3),)))
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
        ticket = claim(pair, peer, 5)
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
