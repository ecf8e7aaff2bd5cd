"""Every transport between this host and another one, on which `deeplink doctor --listen` runs: for real NICs."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Iterator, Mapping

from deeplink import secret as secrets
from deeplink.config import Config
from deeplink.doctor import calling, exchange, kit
from deeplink.doctor.answering import Answering
from deeplink.doctor.exchange import Kit, Meeting
from deeplink.doctor.model import Finding, Section, reason_of
from deeplink.doctor.subject import Subject
from deeplink.doctor.transports import describe, judge
from deeplink.errors import ConfigError, DeadlineExceeded, DeeplinkError, PeerGone, ProtocolError, Reason
from deeplink.kvconnector.contracts.contract import place
from deeplink.kvconnector.wires import greeting, wire
from deeplink.kvconnector.wires.listener import Listener
from deeplink.plugins import Plugins

PORT = 8990
LISTEN = "start `deeplink doctor --listen` there, at an address and a port that this host reaches"


def split(text: str, host: str = "") -> tuple[str, int]:
    """``HOST``, ``HOST:PORT``, ``[IPV6]:PORT``, or, with a `host`, nothing at all. Raises ConfigError."""
    name, colon, port = text.rpartition(":")
    if not colon or (text.count(":") > 1 and not text.startswith("[")) or text.endswith("]"):
        name, port = text, str(PORT)
    name = name.strip("[]") or host
    if not name or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{text!r} is not HOST or HOST:PORT")
    return name, int(port)


def usable(subject: Subject) -> tuple[Config, Plugins]:
    """Raises what is wrong with them."""
    if isinstance(subject.config, DeeplinkError):
        raise subject.config
    if isinstance(subject.plugins, DeeplinkError):
        raise subject.plugins
    return subject.config, subject.plugins


def examine(subject: Subject, peer: str) -> Section:
    """`peer` is where the other doctor listens."""
    name = f"link to {peer}"
    try:
        config, plugins = usable(subject)
        secret, (host, port) = secrets.load(config.secret_file), split(peer)
        with kit.started(config, plugins, secret, subject.effort) as ours:
            meeting = _call(config, secret, host, port, ours)
            return Section(name, tuple(findings(meeting, ours)))
    except ConfigError as exc:
        return Section(name, (Finding("peer", "unknown", "nothing was tried", exc.reason()),))
    except (PeerGone, DeadlineExceeded, ProtocolError) as exc:
        return Section(name, (Finding("peer", "unknown", "nothing was tried", reason_of(exc, LISTEN)),))
    except DeeplinkError as exc:
        return Section(name, (Finding("peer", "failed", "nothing was tried", exc.reason()),))


def _call(config: Config, secret: bytes, host: str, port: int, ours: Kit) -> Meeting:
    deadline = time.monotonic() + exchange.ANSWER_SECONDS
    sock = wire.connect(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", deadline)
    try:
        tls = kit.load_tls(config)
        sock = greeting.greet(sock, secret, exchange.PURPOSE, server=False, deadline=deadline, tls=tls)
        return calling.call(sock, ours)
    finally:
        sock.close()


def findings(meeting: Meeting, ours: Kit) -> Iterator[Finding]:
    """What the meeting showed, for either end of it: every transport that one of the two has."""
    theirs = meeting.theirs
    facts = {"host": theirs.host, "address": meeting.address, "deeplink": theirs.deeplink}
    text = f"{theirs.host} at {meeting.address}, deeplink {theirs.deeplink}, the same secret"
    yield Finding("peer", "works", text, facts=facts)
    running = ours.transports.running
    common = list(exchange.in_common(ours.transports.addresses, theirs.transports))
    for name in common:
        trials = [trial for trial in meeting.trials if trial.transport == name]
        yield judge(name, trials, describe(running[name]) | {"peer_address": theirs.transports[name]}, meeting)
    for name in sorted({*running, *theirs.transports, *ours.off, *theirs.off} - set(common)):
        yield apart(name, ours.transports.addresses, ours.off, theirs.transports, theirs.off)
    if not common:
        nothing = Reason(
            "contract_refused",
            "the two hosts have no transport in common, so no handoff can go between them",
            "transports",
            ", ".join(running) or "none",
            ", ".join(theirs.transports) or "none",
            "install a transport that both sides have, and that reaches from one to the other",
        )
        yield Finding("all", "failed", reason=nothing)


def apart(
    name: str,
    ours: Mapping[str, str],
    our_off: Mapping[str, Reason],
    theirs: Mapping[str, str],
    their_off: Mapping[str, Reason],
) -> Finding:
    """Why a transport is not used between two hosts."""
    if name in ours and name in theirs:
        reason = Reason(
            "contract_refused",
            "it reaches no further than one host, or one network namespace of it",
            f"place of {name}",
            place(ours[name]),
            place(theirs[name]),
        )
        return Finding(name, "off", "not between these two", reason)
    sides = ((ours, our_off), (theirs, their_off))
    states = ["on" if name in on else off[name].message if name in off else "not there" for on, off in sides]
    if "on" not in states:
        return Finding(name, "off", "on neither host", facts={"ours": states[0], "theirs": states[1]})
    remedies = [off[name].remedy for _, off in sides if name in off]
    remedy = next((remedy for remedy in remedies if remedy), "install it on both hosts")
    reason = Reason("contract_refused", f"{name} runs on one of the two hosts only", name, states[0], states[1], remedy)
    return Finding(name, "off", "not between these two", reason)


@contextlib.contextmanager
def listening(subject: Subject, at: str) -> Iterator[tuple[str, Kit, queue.Queue[Meeting]]]:
    """Take other doctors' calls for as long as this lasts: where, with what, and every meeting when it is over.

    Raises ConfigError when the address cannot be had.
    """
    config, plugins = usable(subject)
    secret, (host, port) = secrets.load(config.secret_file), split(at, config.kv.host)
    meetings: queue.Queue[Meeting] = queue.Queue()
    with kit.started(config, plugins, secret, subject.effort) as ours:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            sock = socket.create_server((host, port), family=family)
        except OSError as exc:
            raise ConfigError(
                f"the doctor cannot listen on {host}:{port}: {exc.strerror or exc}",
                remedy="give an address of this host and a free port: --listen HOST:PORT",
            ) from exc
        where = f"[{host}]:{sock.getsockname()[1]}" if ":" in host else f"{host}:{sock.getsockname()[1]}"
        listener = Listener(sock, secret, exchange.PURPOSE, Answering(ours, meetings.put).serve, kit.load_tls(config))
        try:
            yield where, ours, meetings
        finally:
            listener.close()
