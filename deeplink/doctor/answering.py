"""The doctor that listens: it lends memory and pushes, as it is asked."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import msgspec

from deeplink.doctor import exchange
from deeplink.doctor import trial as trials
from deeplink.doctor.exchange import (
    ANSWER_SECONDS,
    Done,
    Gave,
    Give,
    Hello,
    Kit,
    Meeting,
    Message,
    Problem,
    Sent,
    Take,
    Taking,
    Took,
)
from deeplink.doctor.trial import Trial
from deeplink.errors import DeadlineExceeded, DeeplinkError, PeerGone, ProtocolError, Reason
from deeplink.kvconnector.transport.base import Region

_AWAY = "at the other end: "


class Answering:
    """The listener's end: give its `serve` to a Listener. One caller at a time, so memory is bounded; `done` gets each
    meeting when it is over, on the thread that served it."""

    def __init__(self, kit: Kit, done: Callable[[Meeting], None]) -> None:
        self._kit = kit
        self._done = done
        self._free = threading.Lock()
        self._spoiled: DeadlineExceeded | None = None
        """Why the memory is no longer fit for a trial: a peer that does not answer may write to it yet."""

    def serve(self, sock: socket.socket) -> None:
        if not self._free.acquire(blocking=False):
            busy = PeerGone("the doctor there is trying its transports with another one", remedy="try again")
            exchange.send(sock, Problem(busy.reason()))
            raise busy
        try:
            if self._spoiled is not None:
                raise self._spoiled
            self._meet(sock)
        except DeeplinkError as exc:
            with contextlib.suppress(DeeplinkError):
                exchange.send(sock, Problem(exc.reason()))
            raise
        finally:
            self._free.release()

    def _meet(self, sock: socket.socket) -> None:
        ours = exchange.hello(self._kit)
        theirs = exchange.checked(exchange.expect(sock, Hello, ANSWER_SECONDS))
        exchange.send(sock, ours)
        meeting = Meeting(theirs, exchange.addresses(sock)[1])
        length, seconds = exchange.effort(ours, theirs)
        try:
            while not isinstance(question := exchange.receive(sock, 2 * (seconds + 2 * ANSWER_SECONDS)), Done):
                self._answer(sock, meeting, question, length, seconds)
            meeting.trials += [_seen_from_here(trial) for trial in question.trials]
        except DeeplinkError as exc:
            meeting.broken = exc.reason()
            raise
        finally:
            self._done(meeting)

    def _answer(self, sock: socket.socket, meeting: Meeting, question: Message, length: int, seconds: float) -> None:
        if not isinstance(question, (Take, Give)):
            raise ProtocolError(f"{type(question).__name__} out of turn")
        if question.transport not in exchange.in_common(self._kit.transports.addresses, meeting.theirs.transports):
            raise ProtocolError(f"a question about a transport {question.transport!r} that is not in common")
        if question.length > length:
            raise ProtocolError("more than was agreed", field="size", ours=str(length), theirs=str(question.length))
        meeting.trying = question.transport
        if isinstance(question, Take):
            self._take(sock, question, seconds)
        else:
            exchange.send(sock, self._give(sock, meeting.theirs, question, seconds))

    def _take(self, sock: socket.socket, take: Take, seconds: float) -> None:
        kit = self._kit
        kit.memory.clear(take.length)
        region: Region | Reason = trials.attempt(
            lambda: kit.transports.running[take.transport].register(kit.memory.target[: take.length])
        )
        if isinstance(region, Reason):
            exchange.send(sock, Problem(_theirs(region)))
            return
        try:
            exchange.send(sock, Taking(region.key))
            exchange.expect(sock, Sent, seconds + 2 * ANSWER_SECONDS)
        finally:
            self._withdraw(region)
        exchange.send(sock, Took(kit.memory.digest(take.length)))

    def _withdraw(self, region: Region) -> None:
        try:
            region.withdraw()
        except DeadlineExceeded as exc:
            self._spoiled = exc
            raise

    def _give(self, sock: socket.socket, theirs: Hello, give: Give, seconds: float) -> Gave | Problem:
        address = theirs.transports[give.transport]
        if (far := trials.out_of_reach(address, *exchange.addresses(sock))) is not None:
            return Problem(_theirs(far.reason()))
        kit = self._kit
        sent, source = kit.memory.fill(give.length), kit.memory.source[: give.length]
        transport = kit.transports.running[give.transport]
        pushed = trials.attempt(lambda: trials.push(transport, address, give.key, source, kit.chunk, seconds))
        if isinstance(pushed, Reason):
            return Problem(_theirs(pushed))
        return Gave(sent, pushed.seconds, pushed.connecting)


def _seen_from_here(trial: Trial) -> Trial:
    return trial if trial.reason is None else msgspec.structs.replace(trial, reason=_theirs(trial.reason))


def _theirs(reason: Reason) -> Reason:
    """What the one end says went wrong, as the other is to read it."""
    message = reason.message
    told = message[len(_AWAY) :] if message.startswith(_AWAY) else _AWAY + message
    return msgspec.structs.replace(reason, message=told, ours=reason.theirs, theirs=reason.ours)
