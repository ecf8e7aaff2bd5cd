"""What the two ends of a one-sided library's link say to each other: framed msgpack over their socket."""

from __future__ import annotations

import socket
from typing import Annotated, TypeVar

import msgspec

from deeplink.errors import ProtocolError, Refused
from deeplink.kvconnector.wires import frames, wire

MAX_FRAME = 1 << 20

Key = Annotated[bytes, msgspec.Meta(max_length=64)]
Offset = Annotated[int, msgspec.Meta(ge=0)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """What a library says of itself; nobody else reads it."""

    description: bytes


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """A push into these regions: key, first byte, and how many bytes from there its pieces lie within."""

    number: int
    parts: tuple[tuple[Key, Offset, Offset], ...]


class Go(msgspec.Struct, frozen=True, tag="go"):
    """The address of each region's first byte, and the description again if it has changed."""

    bases: tuple[Offset, ...]
    description: bytes


class No(msgspec.Struct, frozen=True, tag="no"):
    problem: Annotated[str, msgspec.Meta(max_length=1024)]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """A region of push `number` is being withdrawn."""

    number: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Nothing that was posted is under way any more."""


Message = Hello | Begin | Go | No | Stop | Ended
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)

T = TypeVar("T", Hello, Begin, Go, Stop, Ended)


def send(sock: socket.socket, message: Message, deadline: float) -> None:
    data = _encoder.encode(message)
    if len(data) > MAX_FRAME:
        raise ProtocolError("a push into too many regions", field="length", ours=str(len(data)), theirs=str(MAX_FRAME))
    wire.send(sock, frames.framed(data), deadline)


def receive(sock: socket.socket, deadline: float) -> Message:
    try:
        return _decoder.decode(frames.receive(sock, MAX_FRAME, deadline))
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ProtocolError(f"not a message of a transport: {exc}") from exc


def expect(sock: socket.socket, kind: type[T], deadline: float) -> T:
    """The next message, which must be of `kind`."""
    return check(receive(sock, deadline), kind)


def check(message: Message, kind: type[T]) -> T:
    """Raises Refused for a No, ProtocolError for anything else that is not of `kind`."""
    if isinstance(message, No):
        raise Refused(f"the peer's transport refused a push: {message.problem}", field="region")
    if not isinstance(message, kind):
        raise ProtocolError(f"{type(message).__name__} out of turn")
    return message
