"""Everything that parses bytes from outside, as functions of bytes. Each returns, whatever it is given.

What a parser may raise is a DeeplinkError, or the subclass it documents; anything else, and any broken property of
what it let through, comes out of these functions as the exception that it is. That is a finding.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
from fake_wire import Asker, Echo, Pool, Wire
from loopback import NHD, SECRET, make_contract, make_group

from deeplink.doctor import exchange
from deeplink.errors import (
    ConfigError,
    DeeplinkError,
    InvalidRequest,
    LayoutError,
    ProtocolError,
    Refused,
    TicketRefused,
)
from deeplink.kvconnector import passage
from deeplink.kvconnector.contracts import contract, weights
from deeplink.kvconnector.contracts.compare import compare
from deeplink.kvconnector.contracts.negotiate import Agreement, Refusal, negotiate
from deeplink.kvconnector.handoffs import channel, ticket
from deeplink.kvconnector.layouts.cast import between, parse_consent
from deeplink.kvconnector.layouts.layout import ELEMENTS, Layout
from deeplink.kvconnector.prefixes import space as prefix_space
from deeplink.kvconnector.transport import answer, dlslime, nixl, talk
from deeplink.kvconnector.transport.base import Transport
from deeplink.kvconnector.transport.shm import ShmTransport
from deeplink.kvconnector.transport.tcp import TcpTransport
from deeplink.kvconnector.wires import greeting as greetings
from deeplink.router import body, kv_events, kv_index, sse
from deeplink.router.client import Client
from deeplink.router.clients import Clients
from deeplink.router.line import Line

Target = Callable[[bytes], None]


def contract_bytes(data: bytes) -> None:
    with contextlib.suppress(ProtocolError, Refused):
        _usable(contract.decode(data))


def contract_json(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        _usable(contract.from_json(data))


def _usable(found: contract.Contract) -> None:
    """Whatever a peer states, both sides and the router get an answer about it, and can show and store it."""
    assert contract.decode(contract.encode(found)) == found
    assert contract.from_json(contract.to_json(found)) == found
    twin = msgspec.structs.replace(found, epoch=f"{found.epoch[:8]}'")
    for pair in ((found, found), (found, twin), (known(), found), (found, known())):
        assert isinstance(negotiate(*pair), (Agreement, Refusal))
        str(compare(*pair))
    for name in found.casts:
        with contextlib.suppress(ConfigError):
            parse_consent(name)


@cache
def known() -> contract.Contract:
    group = make_group(NHD, 16, "bfloat16")
    return make_contract("known", "both", group, channel="127.0.0.1:1", tcp="127.0.0.1:2")


def channel_message(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        message = channel.decode(data)
        assert channel.decode(msgspec.msgpack.encode(message)) == message


def channel_frame(data: bytes) -> None:
    """What arrives on a channel's socket, until the peer leaves."""
    with _sent(data) as ours, contextlib.suppress(DeeplinkError):
        talk = channel.Channel(ours)
        while True:
            talk.receive(time.monotonic() + 1)


def transport_frame(data: bytes) -> None:
    """What a peer says on the socket of a one-sided library's link, until it leaves."""
    with _sent(data) as ours, contextlib.suppress(DeeplinkError):
        while True:
            message = talk.receive(ours, time.monotonic() + 1)
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=talk.Message) == message


def transport_description(data: bytes) -> None:
    """What a peer says of its NIXL agent or DLSlime endpoint: memory that it names has an end."""
    with contextlib.suppress(ProtocolError):
        assert isinstance(nixl.described(data).name, str)
    with contextlib.suppress(ProtocolError):
        dlslime.Handles(dict(enumerate(dlslime.described(data)[1].values())))


def doctor_frame(data: bytes) -> None:
    with _sent(data) as ours, contextlib.suppress(DeeplinkError):
        while True:
            exchange.receive(ours, 1)


def greeting(data: bytes) -> None:
    """A peer that does not know the secret does not get in, whatever it says."""
    for server in (True, False):
        with _sent(data) as ours:
            try:
                greetings.greet(ours, SECRET, "fuzz", server=server, deadline=time.monotonic() + 1)
            except DeeplinkError:
                continue
        raise AssertionError("a peer without the secret was let in")


def ticket_text(data: bytes) -> None:
    with contextlib.suppress(TicketRefused):
        ticket.verify(data.decode("latin-1"), SECRET)
        raise AssertionError("a ticket that nobody minted")


def ticket_body(data: bytes) -> None:
    """As if the router's secret had leaked: the body behind a right MAC."""
    text = base64.urlsafe_b64encode(ticket._mac(data, SECRET) + data).decode()
    with contextlib.suppress(TicketRefused):
        found = ticket.verify(text, SECRET)
        assert ticket.verify(ticket.mint(found, SECRET), SECRET) == found


def layout_text(data: bytes) -> None:
    """Four sizes of a byte or two each, then a layout."""
    sizes = struct.unpack("<BHHB", data[:6].ljust(6, b"\0"))
    text = data[6:].decode("utf-8", "replace")
    with contextlib.suppress(LayoutError):
        layout = Layout.parse(text)
        assert Layout.parse(str(layout)) == layout
        heads, head_dim, block_size, blocks = sizes
        bound = layout.bind(heads=heads, head_dim=head_dim, block_size=block_size, blocks=blocks)
        assert sum(map(bound.elements, range(bound.tensors))) == blocks * bound.kv * heads * head_dim * block_size


def consent(data: bytes) -> None:
    with contextlib.suppress(ConfigError):
        found = parse_consent(data.decode("utf-8", "replace"))
        assert parse_consent(str(found)) == found
        assert any(found.covers(cast) for source in ELEMENTS if (cast := between(source, found.target)))


GUARD = b"\xa5" * 64
KEY = b"KKKKKKKKKKKKKKKK"
"""Stands for the key of the region, which the peer was given."""
REGION = 4096
PATIENCE = answer.BODY_SECONDS


@cache
def _transport(name: str) -> Transport:
    return TcpTransport("127.0.0.1", SECRET) if name == "tcp" else ShmTransport("", SECRET)


def _parts(name: str, data: bytes) -> None:
    """What an admitted peer pushes reaches the region that it has the key of, and nothing beside it."""
    transport = _transport(name)
    memory = bytearray(GUARD + bytes(REGION) + GUARD)
    region = transport.register(memoryview(memory)[len(GUARD) : -len(GUARD)])
    try:
        with _sent(data.replace(KEY, region.key)) as ours, contextlib.suppress(DeeplinkError):
            # Nobody reads the answers; one that finds the socket's buffer full would wait for as long.
            answer.BODY_SECONDS = 0.05
            transport._serve(ours)  # type: ignore[attr-defined]
    finally:
        answer.BODY_SECONDS = PATIENCE
        region.withdraw()
    assert memory.startswith(GUARD)
    assert memory.endswith(GUARD)


def tcp_parts(data: bytes) -> None:
    _parts("tcp", data)


def shm_parts(data: bytes) -> None:
    _parts("shm", data)


@contextlib.contextmanager
def _sent(data: bytes):  # type: ignore[no-untyped-def]
    """Our end of a connection on which the peer has sent `data`, and left without reading."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        yield ours


def router_body(data: bytes) -> None:
    """What the engines are sent is JSON again, and holds no ticket but the router's."""
    try:
        found = body.parse(data)
    except InvalidRequest:
        return
    for chat in (True, False):
        assert isinstance(body.obstacle(found, chat=chat), str)
        with contextlib.suppress(InvalidRequest):
            ours = json.loads(body.prefill(found, {body.PARAMS: body.params("produce", "T")}, chat=chat))
            assert ours.pop(body.PARAMS) == body.params("produce", "T")
            assert ours["stream"] is False
            _no_ticket(ours)
    ours = json.loads(body.decode(found, {body.PARAMS: body.params("consume", "T")}))
    assert ours.pop(body.PARAMS) == body.params("consume", "T")
    _no_ticket(ours)
    assert isinstance(found.stream, bool)


def _no_ticket(fields: dict[str, object]) -> None:
    extra = fields.get("vllm_xargs")
    assert not body.OURS & fields.keys()
    assert not (isinstance(extra, dict) and body.OURS & extra.keys())


def client_bytes(data: bytes) -> None:
    """What a client sends, cut where the first byte says: each request is answered once, in HTTP."""
    asyncio.run(_served(data))


async def _served(data: bytes) -> None:
    api = Echo(most=1 << 16)
    wire = Wire(Client(Clients(api, 1, 10.0), asyncio.get_running_loop()))
    for piece in _cut(data):
        if not wire.closed:
            wire.protocol.data_received(piece)
    assert _answers(bytes(wire.written), api) == len(api.requests) + len(api.refusals)
    assert len(api.refusals) <= 1
    wire.close()


def _answers(written: bytes, api: Echo) -> int:
    """How many answers these bytes are, each of which has its length; those that only say to go on are none."""
    count = 0
    while written:
        head, end, written = written.partition(b"\r\n\r\n")
        assert end
        if head != b"HTTP/1.1 100 Continue":
            length = re.search(rb"\r\nContent-Length: (\d+)", head)
            assert head.startswith(b"HTTP/1.1 ")
            assert length is not None
            bodiless = count < len(api.requests) and api.requests[count].method == "HEAD"
            size = 0 if bodiless else int(length[1])
            assert len(written) >= size
            written = written[size:]
            count += 1
    return count


def engine_bytes(data: bytes) -> None:
    """What an engine answers, cut where the first byte says: whoever asked is told of the end, once."""
    pool, asker = Pool(), Asker()
    wire = Wire(Line(pool, asker, b"HEAD", b"BODY"))
    for piece in _cut(data):
        if not wire.closed:
            wire.protocol.data_received(piece)
    wire.close()
    assert len(asker.whys) == 1
    assert not pool.lines


def _cut(data: bytes) -> list[bytes]:
    step, rest = 1 + data[0] if data else 1, data[1:]
    return [rest[at : at + step] for at in range(0, len(rest), step)]


def engine_body(data: bytes) -> None:
    """A request on its way past an engine's server: what is taken out of it is the ticket, and nothing else."""
    if (found := passage.taken(data)) is not None:
        fields, side, text = found
        assert isinstance(side, str)
        assert isinstance(text, str)
        assert passage.FIELD not in fields


def stored_space(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        space = prefix_space.decode(data)
        assert prefix_space.decode(prefix_space.encode(space)) == space


def cache_events(data: bytes) -> None:
    """What an engine publishes of its cache: named as broken, or something the index can follow and forget."""
    with contextlib.suppress(ProtocolError):
        found = kv_events.decode(data)
        index = kv_index.Index()
        for name in ("a", "b"):
            index.follow(name)
            index.begin(name)
            index.apply(name, found)
        held = index.held(dict.fromkeys(index.sizes, (1, 2, 3)))
        assert all(count >= 0 for count in held.values())
        index.leave("a")
        index.leave("b")
        assert not index.held(dict.fromkeys(index.sizes, (1, 2, 3)))


def events(data: bytes) -> None:
    """An engine's stream, cut where the first byte says: nothing is lost, changed or held back at the end."""
    whole = sse.Events()
    passed = [whole.feed(piece) for piece in _cut(data)]
    assert b"".join([*passed, whole.end()]) == data[1:]
    for part in passed:
        found = sse.error_in(sse.first_data(part))
        assert found is None or isinstance(found, dict)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    shared = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="deeplink-fuzz-", dir=shared if shared.is_dir() else None)


def checkpoint(data: bytes) -> None:
    """A file that calls itself safetensors: named as broken, or read within its bounds."""
    path = Path(_folder().name) / "model.safetensors"
    path.write_bytes(data)
    with contextlib.suppress(ConfigError):
        assert 0 <= weights.examine(path.parent).share <= 1


def checkpoint_index(data: bytes) -> None:
    folder = Path(_folder().name) / "indexed"
    folder.mkdir(exist_ok=True)
    (folder / weights.INDEX).write_bytes(data)
    with contextlib.suppress(ConfigError):
        weights.examine(folder)


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        contract_bytes,
        contract_json,
        channel_message,
        channel_frame,
        transport_frame,
        transport_description,
        doctor_frame,
        greeting,
        ticket_text,
        ticket_body,
        layout_text,
        consent,
        tcp_parts,
        shm_parts,
        client_bytes,
        engine_bytes,
        router_body,
        engine_body,
        events,
        cache_events,
        checkpoint,
        checkpoint_index,
        stored_space,
    )
}
