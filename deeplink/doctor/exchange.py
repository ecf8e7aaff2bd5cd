"""Two doctors try every transport that they have in common, both ways: framed msgpack over a greeted socket.

    caller -> listener   Hello   Take(transport, length)   Sent     Give(transport, key, length)   Done
    listener -> caller   Hello   Taking(key)               Took     Gave(digest, seconds)

The caller asks; each question has one answer, and Problem is always a possible one. `Take` makes the listener grant
memory, into which the caller pushes over the transport; after `Sent` the listener says what lies there. `Give` makes
the listener push into the caller's memory. The digest of what was sent is compared with that of what came by the
caller, which has both. In the end `Done` tells the listener how it went.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec

from deeplink import __version__
from deeplink.doctor import trial as trials
from deeplink.doctor.trial import Memory, Trial
from deeplink.errors import DeeplinkError, DigestMismatch, ProtocolError, Reason, Refused
from deeplink.kvconnector import wire
from deeplink.kvconnector.contract import Name, Text, place
from deeplink.kvconnector.transport.base import Region
from deeplink.kvconnector.transport.start import Transports

PURPOSE = "doctor"
VERSION = 1
MAX_FRAME = 256 << 10
MAX_SECONDS = 600.0
ANSWER_SECONDS = 10.0
"""For an answer that needs no transfer, and what is added to one that does."""
_LENGTH = struct.Struct("<I")

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
    """How it went, for both ends. `broken` says why not everything that could be tried was, and `trying` what it was
    that broke off."""

    theirs: Hello
    trials: list[Trial] = field(default_factory=list)
    broken: Reason | None = None
    trying: str = ""


def call(sock: socket.socket, kit: Kit) -> Meeting:
    """The caller's end, on a socket that has been greeted; it stays the caller's.

    Raises when the two do not come to try anything: PeerGone, DeadlineExceeded, ProtocolError, Refused.
    """
    ours = _hello(kit)
    _send(sock, ours)
    meeting = Meeting(_checked(_expect(sock, Hello, ANSWER_SECONDS)))
    length, seconds = _effort(ours, meeting.theirs)
    try:
        for name in in_common(ours.transports, meeting.theirs.transports):
            meeting.trying = name
            for one in (_outward, _inward):
                meeting.trials.append(one(sock, kit, meeting.theirs, name, length, seconds))
        _send(sock, Done(tuple(meeting.trials)))
    except DeeplinkError as exc:
        meeting.broken = exc.reason()
    return meeting


def in_common(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[str]:
    """Transports by which the two reach each other, ours preferred first."""
    for name, address in ours.items():
        if name in theirs and place(address) == place(theirs[name]):
            yield name


def _outward(sock: socket.socket, kit: Kit, theirs: Hello, name: str, length: int, seconds: float) -> Trial:
    if (far := trials.out_of_reach(theirs.transports[name], sock)) is not None:
        return Trial(name, True, reason=far.reason())
    _send(sock, Take(name, length))
    granted = _answer(sock, Taking, ANSWER_SECONDS)
    if isinstance(granted, Problem):
        return Trial(name, True, reason=granted.reason)
    sent, source = kit.memory.fill(length), kit.memory.source[:length]
    transport, address, key = kit.transports.running[name], theirs.transports[name], granted.key
    pushed = trials.attempt(lambda: trials.push(transport, address, key, source, kit.chunk, seconds))
    _send(sock, Sent())
    took = _answer(sock, Took, 2 * ANSWER_SECONDS)
    if isinstance(pushed, Reason):
        return Trial(name, True, length, reason=pushed)
    reason = took.reason if isinstance(took, Problem) else _compared(sent, took.digest)
    return Trial(name, True, length, pushed.seconds, pushed.connecting, reason)


def _inward(sock: socket.socket, kit: Kit, theirs: Hello, name: str, length: int, seconds: float) -> Trial:
    kit.memory.clear(length)
    region = trials.attempt(lambda: kit.transports.running[name].register(kit.memory.target[:length]))
    if isinstance(region, Reason):
        return Trial(name, False, reason=region)
    try:
        _send(sock, Give(name, region.key, length))
        gave = _answer(sock, Gave, seconds + 2 * ANSWER_SECONDS)
    finally:
        region.withdraw()
    if isinstance(gave, Problem):
        return Trial(name, False, length, reason=gave.reason)
    reason = _compared(kit.memory.digest(length), gave.digest)
    return Trial(name, False, length, gave.seconds, gave.connecting, reason)


class Answering:
    """The listener's end: give its `serve` to a Listener. One caller at a time, so memory is bounded; `done` gets each
    meeting when it is over, on the thread that served it."""

    def __init__(self, kit: Kit, done: Callable[[Meeting], None]) -> None:
        self._kit = kit
        self._done = done
        self._free = threading.Lock()

    def serve(self, sock: socket.socket) -> None:
        if not self._free.acquire(blocking=False):
            busy = Refused("the doctor there is trying its transports with another one", remedy="try again")
            _send(sock, Problem(busy.reason()))
            raise busy
        try:
            self._meet(sock)
        except DeeplinkError as exc:
            with contextlib.suppress(DeeplinkError):
                _send(sock, Problem(exc.reason()))
            raise
        finally:
            self._free.release()

    def _meet(self, sock: socket.socket) -> None:
        ours = _hello(self._kit)
        theirs = _checked(_expect(sock, Hello, ANSWER_SECONDS))
        _send(sock, ours)
        meeting = Meeting(theirs)
        length, seconds = _effort(ours, theirs)
        try:
            while not isinstance(question := _receive(sock, 2 * (seconds + 2 * ANSWER_SECONDS)), Done):
                meeting.trying = self._answer(sock, theirs, question, length, seconds)
            meeting.trials += question.trials
        except DeeplinkError as exc:
            meeting.broken = exc.reason()
            raise
        finally:
            self._done(meeting)

    def _answer(self, sock: socket.socket, theirs: Hello, question: Message, length: int, seconds: float) -> str:
        """The transport it was about."""
        if not isinstance(question, (Take, Give)):
            raise ProtocolError(f"{type(question).__name__} out of turn")
        if question.transport not in in_common(self._kit.transports.addresses, theirs.transports):
            raise ProtocolError(f"a question about a transport {question.transport!r} that is not in common")
        if question.length > length:
            raise ProtocolError("more than was agreed", field="size", ours=str(length), theirs=str(question.length))
        if isinstance(question, Take):
            self._take(sock, question, seconds)
        else:
            _send(sock, self._give(sock, theirs, question, seconds))
        return question.transport

    def _take(self, sock: socket.socket, take: Take, seconds: float) -> None:
        kit = self._kit
        kit.memory.clear(take.length)
        region: Region | Reason = trials.attempt(
            lambda: kit.transports.running[take.transport].register(kit.memory.target[: take.length])
        )
        if isinstance(region, Reason):
            _send(sock, Problem(_theirs(region)))
            return
        try:
            _send(sock, Taking(region.key))
            _expect(sock, Sent, seconds + 2 * ANSWER_SECONDS)
        finally:
            region.withdraw()
        _send(sock, Took(kit.memory.digest(take.length)))

    def _give(self, sock: socket.socket, theirs: Hello, give: Give, seconds: float) -> Gave | Problem:
        address = theirs.transports[give.transport]
        if (far := trials.out_of_reach(address, sock)) is not None:
            return Problem(_theirs(far.reason()))
        kit = self._kit
        transport, source, sent = (
            kit.transports.running[give.transport],
            kit.memory.source,
            kit.memory.fill(give.length),
        )
        pushed = trials.attempt(
            lambda: trials.push(transport, address, give.key, source[: give.length], kit.chunk, seconds)
        )
        if isinstance(pushed, Reason):
            return Problem(_theirs(pushed))
        return Gave(sent, pushed.seconds, pushed.connecting)


def _hello(kit: Kit) -> Hello:
    addresses = kit.transports.addresses
    return Hello(VERSION, __version__, socket.gethostname(), kit.memory.length, kit.seconds, addresses, dict(kit.off))


def _checked(hello: Hello) -> Hello:
    if hello.version != VERSION:
        raise Refused(
            "the doctors speak different versions of their protocol",
            field="version",
            ours=f"{VERSION} (deeplink {__version__})",
            theirs=f"{hello.version} (deeplink {hello.deeplink})",
            remedy="run the same deeplink release on both hosts",
        )
    return hello


def _effort(ours: Hello, theirs: Hello) -> tuple[int, float]:
    """Bytes each way, and seconds for them: what both have memory for, and the patience of the more patient."""
    return min(ours.size, theirs.size), max(ours.seconds, theirs.seconds)


def _compared(sent: str, came: str) -> Reason | None:
    if sent == came:
        return None
    return DigestMismatch("what came is not what was sent", field="digest", ours=sent, theirs=came).reason()


def _theirs(reason: Reason) -> Reason:
    """What went wrong here, as the other side is to read it."""
    return msgspec.structs.replace(
        reason, message=f"at the other end: {reason.message}", ours=reason.theirs, theirs=reason.ours
    )


def _send(sock: socket.socket, message: Message) -> None:
    data = msgspec.msgpack.encode(message)
    wire.send(sock, _LENGTH.pack(len(data)) + data, time.monotonic() + ANSWER_SECONDS)


def _receive(sock: socket.socket, seconds: float) -> Message:
    deadline = time.monotonic() + seconds
    (length,) = _LENGTH.unpack(wire.receive(sock, _LENGTH.size, deadline))
    if length > MAX_FRAME:
        raise ProtocolError("a frame larger than the limit", field="length", ours=str(MAX_FRAME), theirs=str(length))
    try:
        return _decoder.decode(wire.receive(sock, length, deadline))
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ProtocolError(f"not a message between doctors: {exc}") from exc


def _answer(sock: socket.socket, kind: type[M], seconds: float) -> M | Problem:
    message = _receive(sock, seconds)
    if not isinstance(message, (kind, Problem)):
        raise ProtocolError(f"{type(message).__name__} out of turn, instead of {kind.__name__}")
    return message


def _expect(sock: socket.socket, kind: type[M], seconds: float) -> M:
    message = _answer(sock, kind, seconds)
    if isinstance(message, Problem):
        raise DeeplinkError.from_reason(message.reason)
    return message
