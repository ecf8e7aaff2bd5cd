"""The doctor that calls: it asks, and judges what came of each transport."""

from __future__ import annotations

import socket

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
    Problem,
    Sent,
    Take,
    Taking,
    Took,
)
from deeplink.doctor.trial import Trial
from deeplink.errors import DeeplinkError, DigestMismatch, Reason


def call(sock: socket.socket, kit: Kit) -> Meeting:
    """The caller's end, on a socket that has been greeted; it stays the caller's.

    Raises when the two do not come to try anything: PeerGone, DeadlineExceeded, ProtocolError, Refused.
    """
    ours = exchange.hello(kit)
    exchange.send(sock, ours)
    theirs = exchange.checked(exchange.expect(sock, Hello, ANSWER_SECONDS))
    meeting = Meeting(theirs, exchange.addresses(sock)[1])
    length, seconds = exchange.effort(ours, theirs)
    try:
        for name in exchange.in_common(ours.transports, theirs.transports):
            meeting.trying = name
            for one in (_outward, _inward):
                meeting.trials.append(one(sock, kit, theirs, name, length, seconds))
        exchange.send(sock, Done(tuple(meeting.trials)))
    except DeeplinkError as exc:
        meeting.broken = exc.reason()
    return meeting


def _outward(sock: socket.socket, kit: Kit, theirs: Hello, name: str, length: int, seconds: float) -> Trial:
    if (far := trials.out_of_reach(theirs.transports[name], *exchange.addresses(sock))) is not None:
        return Trial(name, True, reason=far.reason())
    exchange.send(sock, Take(name, length))
    granted = exchange.answer(sock, Taking, ANSWER_SECONDS)
    if isinstance(granted, Problem):
        return Trial(name, True, reason=granted.reason)
    sent, source = kit.memory.fill(length), kit.memory.source[:length]
    transport, address, key = kit.transports.running[name], theirs.transports[name], granted.key
    pushed = trials.attempt(lambda: trials.push(transport, address, key, source, kit.chunk, seconds))
    exchange.send(sock, Sent())
    took = exchange.answer(sock, Took, 2 * ANSWER_SECONDS)
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
        exchange.send(sock, Give(name, region.key, length))
        gave = exchange.answer(sock, Gave, seconds + 2 * ANSWER_SECONDS)
    finally:
        region.withdraw()
    if isinstance(gave, Problem):
        return Trial(name, False, length, reason=gave.reason)
    reason = _compared(kit.memory.digest(length), gave.digest)
    return Trial(name, False, length, gave.seconds, gave.connecting, reason)


def _compared(sent: str, came: str) -> Reason | None:
    if sent == came:
        return None
    return DigestMismatch("what came is not what was sent", field="digest", ours=sent, theirs=came).reason()
