"""Two doctors try every transport that they have in common, both ways: framed msgpack over a greeted socket.

    caller -> listener   Hello   Take(transport, length)   Sent     Give(transport, key, length)   Done
    listener -> caller   Hello   Taking(key)               Took     Gave(digest, seconds)

The caller asks; each question has one answer, and Problem is always a possible one. `Take` makes the listener grant
memory, into which the caller pushes over the transport; after `Sent` the listener says what lies there. `Give` makes
the listener push into the caller's memory. The digest of what was sent is compared with that of what came by the
caller, which has both. In the end `Done` tells the listener how it went. Here is what both ends say; `calling` and
`answering` are the ends.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec

from deeplink import __version__
from deeplink.doctor.trial import Memory, Trial
from deeplink.errors import DeeplinkError, PeerGone, ProtocolError, Reason, Refused
from deeplink.kvconnector.contracts.contract import Name, Text, place
from deeplink.kvconnector.transport.start import Transports
from deeplink.kvconnector.wires import frames, wire

PURPOSE = "doctor"
VERSION = 1
MAX_FRAME = 1 << 20
MAX_SECONDS = 600.0
ANSWER_SECONDS = 10.0
"""For an answer that needs no transfer, and what is added to one that does."""

Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Key = Annotated[bytes, msgspec.Meta(max_length=64)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """`size` is how much memory there is each way, `off` why other transports do not run."""

    version: int
    deeplink: Name
    host: Name
    size: Size
    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
    transports: Annotated[dict[Name, Text], msgspec.Meta(max_length=64)]
    off: Annotated[dict[Name, Reason], msgspec.Meta(max_length=64)]


class Take(msgspec.Struct, frozen=True, tag="take"):
    transport: Name
    length: Size


class Taking(msgspec.Struct, frozen=True, tag="taking"):
    key: Key


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    """All that the caller will push, whether that went well or not."""


class Took(msgspec.Struct, frozen=True, tag="took"):
    digest: Name


class Give(msgspec.Struct, frozen=True, tag="give"):
    transport: Name
    key: Key
    length: Size


class Gave(msgspec.Struct, frozen=True, tag="gave"):
    digest: Name
    seconds: float
    connecting: float


class Done(msgspec.Struct, frozen=True, tag="done"):
    trials: Annotated[tuple[Trial, ...], msgspec.Meta(max_length=128)]


class Problem(msgspec.Struct, frozen=True, tag="problem"):
    reason: Reason


Message = Hello | Take | Taking | Sent | Took | Give | Gave | Done | Problem
M = TypeVar("M", Hello, Taking, Sent, Took, Gave)
_decoder = msgspec.msgpack.Decoder(Message)


@dataclass(frozen=True, slots=True)
class Kit:
    """What one doctor brings. The transports have taken the memory's arena; `chunk` is in bytes, `seconds` for each
    trial."""

    transports: Transports
    off: Mapping[str, Reason]
    memory: Memory
    chunk: int
    seconds: float


@dataclass(slots=True)
class Meeting:
    """How it went, for both ends. `address` is the peer's IP address; `broken` says why not everything that could be
    tried was, and `trying` what it was that broke off."""

    theirs: Hello
    address: str
    trials: list[Trial] = field(default_factory=list)
    broken: Reason | None = None
    trying: str = ""


def in_common(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[str]:
    """Transports by which the two reach each other, ours preferred first."""
    for name, address in ours.items():
        if name in theirs and place(address) == place(theirs[name]):
            yield name


def addresses(sock: socket.socket) -> tuple[str, str]:
    """The IP addresses of a connection, ours first."""
    try:
        return sock.getsockname()[0], sock.getpeername()[0]
    except OSError as exc:
        raise PeerGone(f"the connection is closed: {exc}") from exc


def hello(kit: Kit) -> Hello:
    return Hello(
        VERSION,
        __version__,
        socket.gethostname(),
        kit.memory.length,
        kit.seconds,
        kit.transports.addresses,
        dict(kit.off),
    )


def checked(hello: Hello) -> Hello:
    if hello.version != VERSION:
        raise Refused(
            "the doctors speak different versions of their protocol",
            field="version",
            ours=f"{VERSION} (deeplink {__version__})",
            theirs=f"{hello.version} (deeplink {hello.deeplink})",
            remedy="run the same deeplink release on both hosts",
        )
    return hello


def effort(ours: Hello, theirs: Hello) -> tuple[int, float]:
    """Bytes each way, and seconds for them: what both have memory for, and the patience of the more patient."""
    return min(ours.size, theirs.size), max(ours.seconds, theirs.seconds)


def send(sock: socket.socket, message: Message) -> None:
    data = msgspec.msgpack.encode(message)
    wire.send(sock, frames.framed(data), time.monotonic() + ANSWER_SECONDS)


def receive(sock: socket.socket, seconds: float) -> Message:
    try:
        return _decoder.decode(frames.receive(sock, MAX_FRAME, time.monotonic() + seconds))
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ProtocolError(f"not a message between doctors: {exc}") from exc


def answer(sock: socket.socket, kind: type[M], seconds: float) -> M | Problem:
    message = receive(sock, seconds)
    if not isinstance(message, (kind, Problem)):
        raise ProtocolError(f"{type(message).__name__} out of turn, instead of {kind.__name__}")
    return message


def expect(sock: socket.socket, kind: type[M], seconds: float) -> M:
    message = answer(sock, kind, seconds)
    if isinstance(message, Problem):
        raise DeeplinkError.from_reason(message.reason)
    return message
