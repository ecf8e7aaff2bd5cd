"""Two engines with several transports: the agreed one is used, by both, and no other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from loopback import SECRET, Pair, read, start_others
from sockets import eventually

from deeplink.errors import HandoffError
from deeplink.kvconnector.contracts import contract as co
from deeplink.kvconnector.handoffs import channel as ch
from deeplink.kvconnector.transport.base import Push
from deeplink.kvconnector.transport.shm import ShmTransport

Make = Callable[..., Pair]
TOKENS = 333
OURS, THEIRS = [5, 0, 7, 9, 2, 11], [3, 1, 8]


class Elsewhere(ShmTransport):
    """As in another container."""

    def __init__(self, host: str, secret: bytes) -> None:
        super().__init__(host, secret)
        self.address = co.local_address("another.1", "name")


@pytest.fixture
def shm() -> Iterator[ShmTransport]:
    made = ShmTransport("127.0.0.1", SECRET)
    yield made
    made.close()


def unused(pushes: Sequence[Push]) -> Sequence[Push]:
    raise HandoffError("tcp was not agreed")


def hand_over(pair: Pair) -> None:
    pair.hand_over(TOKENS, OURS, THEIRS)
    ours, theirs = read(pair.producer.cache, OURS, 0, TOKENS), read(pair.consumer.cache, THEIRS, 0, TOKENS)
    np.testing.assert_array_equal(ours, theirs)


def test_the_preferred_one_is_used(make: Make, shm: ShmTransport) -> None:
    pair = make(producer={"others": {"shm": shm}}, consumer={"others": start_others("shm")})
    pair.producer.transport.meddle = unused
    hand_over(pair)
    hand_over(pair)  # over what was kept
    theirs = pair.consumer.endpoint.transports.running["shm"]
    eventually(lambda: (len(shm._listener._open), len(theirs._listener._open)) == (0, 1))  # type: ignore[attr-defined]


@pytest.mark.parametrize("theirs", [{}, {"shm": Elsewhere}])
def test_one_that_does_not_reach_is_not(make: Make, shm: ShmTransport, theirs: dict[str, type[ShmTransport]]) -> None:
    others = {name: made("127.0.0.1", SECRET) for name, made in theirs.items()}
    pair = make(producer={"others": {"shm": shm}}, consumer={"others": others})
    hand_over(pair)
    assert len(pair.consumer.transport._listener._open) == 1


@pytest.mark.parametrize("name", ["tcp", "no such", ""])
def test_a_claim_for_another_transport_is_refused(make: Make, shm: ShmTransport, name: str) -> None:
    pair = make(producer={"others": {"shm": shm}}, consumer={"others": start_others("shm")})
    ticket, text = pair.ticket(60)
    pair.open(ticket, TOKENS)
    pair.fill(ticket, OURS, TOKENS)
    deadline = time.monotonic() + 10
    channel = ch.Channel.connect(ticket.channels[0], SECRET, deadline)
    channel.send(ch.Hello(co.encode(pair.consumer.endpoint.contract)), deadline)
    assert isinstance(channel.receive(deadline), ch.Hello)
    address = pair.consumer.transport.address
    channel.send(
        ch.Claim(text, b"claim", b"prompt", (ch.Part(0, (0, 1, 2), (0, 2), 0, TOKENS),), name, address), deadline
    )
    answer = channel.receive(deadline)
    assert isinstance(answer, ch.Fail)
    assert (answer.reason.field, answer.reason.ours, answer.reason.theirs) == ("transport", "shm", name)
    channel.close()
    pair.settle(ticket, "failed", None)
