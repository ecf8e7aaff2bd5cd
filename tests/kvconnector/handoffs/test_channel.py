"""The channel's frames: whatever arrives is a message or a ProtocolError."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import SECRET, Pair
from sockets import InThread, soon

from deeplink.config import MAX_CHUNK
from deeplink.errors import PeerGone, ProtocolError, Reason
from deeplink.kvconnector.contracts.contract import MAX_BYTES
from deeplink.kvconnector.handoffs import channel as ch
from deeplink.kvconnector.handoffs.channel import Channel, decode
from deeplink.kvconnector.handoffs.first_token import FirstToken
from deeplink.kvconnector.handoffs.handoff import BEGUN, COMPLETE, NOT_BEGUN
from deeplink.kvconnector.handoffs.tally import Half
from deeplink.kvconnector.relayout.plan import TILE

REASON = Reason("aborted", "enough", "field", "ours", "theirs", "remedy")
MESSAGES = [
    ch.Hello(b"contract"),
    ch.Claim("ticket", b"claim", b"prompt", (ch.Part(1, (0, 5), (2, 4), 16, 64),), "tcp", "127.0.0.1:1"),
    ch.Accept(),
    ch.Chunk(3, 1, 16, 64, 4096, bytes(24)),
    ch.Grant(3, b"key"),
    ch.Sent(3),
    ch.Landed(3),
    ch.End(),
    ch.End(FirstToken(17, -0.5, ((17, -0.5),), 64)),
    ch.Fail(REASON),
    ch.Quit(REASON),
    ch.Ask("handoff"),
    ch.Cancel("handoff"),
    ch.Answer(None, 1 << 40, 1 << 39, 2, 3, {"loaded": 4}),
    ch.Watch(("handoff", "another"), (NOT_BEGUN, BEGUN)),
    ch.Watched((BEGUN, COMPLETE)),
]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    a, b = socket.socketpair()
    channel = Channel(b)
    yield a, channel
    a.close()
    channel.close()


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: ch.Message, ends: tuple[socket.socket, Channel]) -> None:
    other = Channel(ends[0])
    other.send(message, soon())
    assert ends[1].receive(soon()) == message


def test_every_message_is_tried() -> None:
    assert {type(message) for message in MESSAGES} == set(ch.Message.__args__)


def test_the_digests_of_the_largest_chunk_fit_in_a_frame(ends: tuple[socket.socket, Channel]) -> None:
    """Heads of 32 elements with 2 bytes each: more digests per byte than any engine's cache has."""
    heads, head_dim, size = 8, 32, 2
    tokens = MAX_CHUNK // (2 * heads * head_dim * size)
    assert tokens % TILE == 0
    digests = bytes(8 * 2 * heads * (tokens // TILE + 1))  # one tile more: the range may begin within one
    message = ch.Chunk((1 << 31) - 1, 255, 0, tokens, MAX_CHUNK, digests)
    assert len(msgspec.msgpack.encode(message)) < ch.MAX_FRAME // 4 * 3
    sending = InThread(lambda: Channel(ends[0]).send(message, soon()))
    assert ends[1].receive(soon()) == message
    sending.join()


def decodes_or_refuses(data: bytes) -> None:
    try:
        message = decode(data)
    except ProtocolError:
        return
    assert isinstance(message, ch.Message)


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    decodes_or_refuses(data)


@given(st.data())
def test_mutated_bytes(data: st.DataObject) -> None:
    good = bytearray(msgspec.msgpack.encode(data.draw(st.sampled_from(MESSAGES))))
    for _ in range(data.draw(st.integers(1, 6))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_refuses(bytes(good[: data.draw(st.integers(0, len(good)))]))
    decodes_or_refuses(bytes(good))


@given(st.recursive(st.none() | st.integers() | st.binary(max_size=9) | st.text(max_size=9), st.lists, max_leaves=9))
def test_any_values_in_any_field(value: object) -> None:
    for message in MESSAGES:
        for name in message.__struct_fields__:
            fields = {"type": message.__struct_config__.tag, **msgspec.structs.asdict(message), name: value}
            try:
                data = msgspec.msgpack.encode(fields)
            except OverflowError:
                continue
            decodes_or_refuses(data)


@pytest.mark.parametrize(
    "message",
    [
        ch.Hello(bytes(MAX_BYTES + 1)),
        ch.Claim("x" * (64 * 1024 + 1), b"", b"", (), "", ""),
        ch.Claim("", bytes(65), b"", (), "", ""),
        ch.Claim("", b"", bytes(65), (), "", ""),
        ch.Claim("", b"", b"", (ch.Part(0, (0,), (0, 1), -1, 0),), "", ""),
        ch.Claim("", b"", b"", (ch.Part(0, (0,), (0, 1), 0, 1 << 40),), "", ""),
        ch.Claim("", b"", b"", (ch.Part(0, (), (0, 1), 0, 1),), "", ""),
        ch.Claim("", b"", b"", (ch.Part(0, (0,), (0, 1), 0, 1),) * 257, "", ""),
        ch.Chunk(0, 0, 0, 0, -1, b""),
        ch.Grant(0, bytes(65)),
        ch.Grant(-1, b""),
        ch.Ask("x" * 257),
    ],
)
def test_limits(message: ch.Message) -> None:
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode(message))


def test_a_frame_larger_than_the_limit_is_refused_unread(ends: tuple[socket.socket, Channel]) -> None:
    ends[0].sendall(struct.pack("<I", ch.MAX_FRAME + 1))
    with pytest.raises(ProtocolError) as caught:
        ends[1].receive(soon())
    assert (caught.value.field, caught.value.theirs) == ("length", str(ch.MAX_FRAME + 1))


@pytest.mark.parametrize("sent", [b"", b"\0", struct.pack("<I", 10), struct.pack("<I", 10) + b"123456789"])
def test_a_frame_cut_off(sent: bytes, ends: tuple[socket.socket, Channel]) -> None:
    ends[0].sendall(sent)
    ends[0].close()
    with pytest.raises(PeerGone):
        ends[1].receive(soon())


def test_close_wakes_a_thread_that_receives(ends: tuple[socket.socket, Channel]) -> None:
    thread = InThread(lambda: ends[1].receive(soon(60)))
    assert not ends[1].readable(0.05)
    ends[1].close()
    with pytest.raises(PeerGone):
        thread.join()
    with pytest.raises(PeerGone):
        ends[1].readable(0)
    with pytest.raises(PeerGone):
        ends[1].send(ch.End(), soon())


def test_readable_is_true_at_the_end_of_the_stream(ends: tuple[socket.socket, Channel]) -> None:
    assert not ends[1].readable(0)
    ends[0].close()
    assert ends[1].readable(5)


def test_ask(pair: Pair) -> None:
    address = pair.producer.endpoint.contract.ranks[0].channel
    answer = ch.ask(address, SECRET, ch.Ask(""))
    half = Half(handoffs=0, claims=0, capacity=1 << 20, used=0)
    halves = {"producer": half, "consumer": half}
    assert answer == ch.Answer(None, staging_capacity=2 << 20, halves=halves)
    assert ch.ask(address, SECRET, ch.Ask("unknown")).record is None
    ticket, _ = pair.ticket()
    pair.producer.endpoint.producer.open(ticket, b"prompt", 10)
    record = ch.ask(address, SECRET, ch.Ask(ticket.handoff)).record
    assert record is not None
    assert (record.state, record.side) == ("filling", "producer")
    record = ch.ask(address, SECRET, ch.Cancel(ticket.handoff)).record
    assert record is not None
    assert record.state == "aborted"
    assert ch.ask(address, SECRET, ch.Cancel(ticket.handoff)).record == record
    assert ch.ask(address, SECRET, ch.Ask("")).ended == {"aborted": 1}


def test_ask_nobody() -> None:
    with pytest.raises(PeerGone):
        ch.ask("127.0.0.1:1", SECRET, ch.Ask(""))


def test_last_words_are_heard_although_sending_breaks() -> None:
    """A peer that fails closes with our messages unread, so the next one we send is answered with a reset."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = Channel(socket.create_connection(server.getsockname()))
        sock, _ = server.accept()
    theirs = Channel(sock)
    for _ in range(3):
        ours.send(ch.Landed(1), soon())
    theirs.send(ch.Sent(0), soon())
    theirs.send(ch.Fail(REASON), soon())
    theirs.close()
    with pytest.raises(PeerGone):  # noqa: PT012 - the first may still go out
        for _ in range(1000):
            ours.send(ch.Landed(1), soon())
    assert ours.last_words() == REASON
    assert ours.last_words() is None
    ours.close()
    assert ours.last_words() is None


def test_no_last_words(ends: tuple[socket.socket, Channel]) -> None:
    assert ends[1].last_words() is None
    ends[0].sendall(struct.pack("<I", 3) + b"abc")
    assert ends[1].last_words() is None
