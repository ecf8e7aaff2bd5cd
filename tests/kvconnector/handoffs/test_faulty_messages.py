"""Well-formed messages in any order and with any numbers: the conversation ends by name, the thread does not die of it,
and nothing is held.

An exception that is not ours would end a thread, which pytest takes for an error.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopback import SECRET, Pair, make_pair, start_others

from deeplink.errors import DeeplinkError, PeerGone, ProtocolError, Reason
from deeplink.kvconnector.contracts.contract import encode
from deeplink.kvconnector.handoffs import channel as ch
from deeplink.kvconnector.transport import tcp
from deeplink.kvconnector.wires import wire

TOKENS = 100
counts = st.sampled_from([0, 1, 2, 3, 15, 16, 99, 100, 101, 4096, 1 << 31])
texts = st.one_of(st.text(max_size=20), st.sampled_from(["tcp", "shm", "127.0.0.1:1", "[::1]:99999", "a\0b:1", ":"]))
short = st.binary(max_size=64)
parts = st.builds(
    ch.Part,
    st.sampled_from([0, 0, 0, 1]),
    st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),
    st.tuples(st.integers(0, 2), st.integers(0, 3)),
    counts,
    counts,
)
chunks = st.builds(
    lambda index, part, start, stop, length, digests: ch.Chunk(
        index, part, start, stop, max(0, min(1 << 31, (stop - start) * 1536)) if length is None else length, digests
    ),
    counts,
    st.sampled_from([0, 0, 1]),
    counts,
    counts,
    st.none() | counts,
    st.binary(max_size=32) | st.just(bytes(8 * 12)),
)
from_consumers = st.one_of(
    st.builds(ch.Grant, counts, short),
    st.builds(ch.Landed, counts),
    st.builds(ch.Sent, counts),
    st.builds(ch.Ask, st.text(max_size=9)),
    st.just(ch.Hello(b"")),
    chunks,
)
from_producers = st.one_of(
    chunks, chunks, st.builds(ch.Sent, counts), st.just(ch.End()), st.builds(ch.Grant, counts, short)
)
HEALTH = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@pytest.fixture(scope="module", params=["tcp", "shm"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = make_pair(
        producer={"others": start_others(request.param), "staging": 4 * 16 * 1536},
        consumer={"others": start_others(request.param), "staging": 4 * 16 * 1536},
    )
    yield made
    made.close()


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


@given(
    name=short,
    asked=st.just((ch.Part(0, (0, 1, 2), (0, 2), 0, TOKENS),)) | st.lists(parts, max_size=4).map(tuple),
    transport=st.sampled_from(["", "", "", "other"]),
    address=st.sampled_from(["there", "there", "no name"]) | texts,
    stop=counts,
    messages=st.lists(from_consumers, max_size=6),
)
@settings(max_examples=60, deadline=None, suppress_health_check=HEALTH)
def test_whatever_a_consumer_claims_and_says(
    pair: Pair,
    name: bytes,
    asked: tuple[ch.Part, ...],
    transport: str,
    address: str,
    stop: int,
    messages: list[ch.Message],
) -> None:
    ticket, text = pair.ticket(30)
    pair.open(ticket, TOKENS)
    pair.fill(ticket, [5, 2], TOKENS)
    channel = ch.Channel.connect(pair.producer.endpoint.contract.ranks[0].channel, SECRET, soon())
    channel.send(ch.Hello(encode(pair.consumer.endpoint.contract)), soon())
    assert isinstance(channel.receive(soon()), ch.Hello)
    agreed = next(iter(pair.producer.endpoint.contract.ranks[0].transports))
    there = pair.consumer.endpoint.contract.ranks[0].transports[agreed]
    address = {"there": there, "no name": there.rpartition("/")[0] + "/"}.get(address, address)
    claim = ch.Claim(text, name, b"prompt", asked, transport or agreed, address, stop)
    with contextlib.suppress(DeeplinkError):  # it may have closed the connection already
        for message in (claim, *messages):
            channel.send(message, soon())
        channel.send(ch.Quit(Reason("aborted", "enough")), soon())
    with contextlib.suppress(DeeplinkError):
        while not isinstance(message := channel.receive(soon()), (ch.Fail, ch.End)):
            assert isinstance(message, (ch.Accept, ch.Chunk, ch.Sent))
    channel.close()
    pair.producer.endpoint.producer.abort(ticket.handoff)
    pair.quiet()
    record = pair.producer.record(ticket)
    assert record is not None
    assert record.reason is None or "unexpectedly" not in record.reason.message


@given(messages=st.lists(from_producers, max_size=6), accepts=st.sampled_from([True, True, True, False]))
@settings(max_examples=60, deadline=None, suppress_health_check=HEALTH)
def test_whatever_a_producer_answers(pair: Pair, messages: list[ch.Message], accepts: bool) -> None:
    def serve(channel: ch.Channel, *_: object) -> None:
        for message in ([ch.Accept()] if accepts else []) + messages:
            channel.send(message, soon())
        raise ProtocolError("this was all")

    producer = pair.producer.endpoint.producer
    real, producer.serve = producer.serve, serve  # type: ignore[method-assign, assignment]
    try:
        ticket, text = pair.ticket(30)
        pair.load(pair.order(ticket, text, [3], TOKENS))
        reason = pair.outcome().reason
        assert reason is not None
        assert "unexpectedly" not in reason.message
        pair.quiet()
    finally:
        producer.serve = real  # type: ignore[method-assign]


def test_a_link_whose_peer_has_gone_before_it_is_looked_at() -> None:
    with socket.socket() as sock, pytest.raises(PeerGone):
        tcp._default(sock)


@given(address=texts)
@settings(deadline=None)
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(DeeplinkError):
        wire.connect(address, soon(0.2)).close()
