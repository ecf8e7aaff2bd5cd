"""Every transport that a plugin registers: started here, as an engine would, and tried out against a second process."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from deeplink.config import Config
from deeplink.doctor import calling, exchange, kit, second
from deeplink.doctor.exchange import Kit, Meeting
from deeplink.doctor.model import Finding, Section, Standing
from deeplink.doctor.subject import Effort, Subject
from deeplink.doctor.trial import Trial
from deeplink.errors import ConfigError, DeadlineExceeded, DeeplinkError, Reason
from deeplink.kvconnector.contracts.contract import place
from deeplink.kvconnector.transport.base import Transport
from deeplink.kvconnector.wires import greeting, wire
from deeplink.plugins import Plugins

NAME = "transports"


def examine(subject: Subject) -> Section:
    config, plugins = subject.config, subject.plugins
    if isinstance(config, DeeplinkError) or isinstance(plugins, DeeplinkError):
        what = "configuration" if isinstance(config, DeeplinkError) else "plugins"
        return Section(NAME, (Finding("all", "unknown", f"not tried: something is wrong with the {what}, see above"),))
    return Section(NAME, tuple(_findings(config, plugins, subject.effort)))


def _findings(config: Config, plugins: Plugins, effort: Effort) -> Iterator[Finding]:
    secret = secrets.token_bytes(32)  # of this run: an engine's is not needed to try this host with itself
    try:
        with kit.started(config, plugins, secret, effort) as ours:
            if ours.transports.running:
                meeting = _try(config, secret, effort, ours)
                for name, transport in ours.transports.running.items():
                    yield _judge(name, transport, meeting)
            else:
                nothing = ConfigError("no transport works here, so no engine can start here", field="transports")
                yield Finding("all", "failed", reason=nothing.reason())
            for name, problem in ours.transports.failed.items():
                yield Finding(name, _standing(problem), "not used", ours.off[name], {"usable": False})
    except ConfigError as exc:
        yield Finding("all", "unknown", "not tried", exc.reason())


def _standing(problem: Exception) -> Standing:
    """A ConfigError says that the transport knows why it is not for this host; anything else is an accident."""
    if not isinstance(problem, ConfigError):
        return "failed"
    cause = problem.__cause__
    broken = isinstance(cause, ImportError) and not isinstance(cause, ModuleNotFoundError)
    return "warning" if broken else "off"  # what is installed was meant to be used


def _try(config: Config, secret: bytes, effort: Effort, ours: Kit) -> Meeting | Reason:
    """All of them against a second process, or why that could not be begun."""
    try:
        with second.running(config, secret, effort) as other:
            deadline = time.monotonic() + exchange.ANSWER_SECONDS
            sock = wire.connect(other.address, deadline)
            try:
                sock = greeting.greet(sock, secret, exchange.PURPOSE, server=False, deadline=deadline)
                meeting = calling.call(sock, ours)
            finally:
                sock.close()
            if meeting.broken is not None:
                message = f"{meeting.broken.message}; {other.last_words()}"
                meeting.broken = msgspec.structs.replace(meeting.broken, message=message)
            return meeting
    except DeeplinkError as exc:
        return exc.reason()


def _judge(name: str, transport: Transport, meeting: Meeting | Reason) -> Finding:
    facts = describe(transport)
    if isinstance(meeting, Reason):
        return Finding(name, "failed", "starts here; not tried out", meeting, facts)
    if (why := meeting.theirs.off.get(name)) is not None:
        return Finding(name, "failed", "starts here, but not in a second process", why, facts)
    return judge(name, [trial for trial in meeting.trials if trial.transport == name], facts, meeting)


def judge(name: str, trials: Sequence[Trial], facts: dict[str, Any], meeting: Meeting) -> Finding:
    """What the two trials of a transport, there and back, come to."""
    facts = {**facts, "trials": [as_facts(trial) for trial in trials]}
    went = ", ".join(_went(trial) for trial in trials)
    for trial in trials:
        if trial.reason is not None:
            return Finding(name, "failed", f"the self-test: {went}", _advised(trial.reason), facts)
    if len(trials) < 2:
        standing: Standing = "failed" if meeting.trying == name else "unknown"
        text = "the self-test broke off" if meeting.trying == name else "no result, as the self-test broke off"
        return Finding(name, standing, text, meeting.broken, facts)
    size = f"{trials[0].length >> 20} MiB each way, digests equal"
    return Finding(name, "works", f"{went} ({size}); {_kind(facts)}", facts=facts)


def _went(trial: Trial) -> str:
    way = "there" if trial.outward else "back"
    return f"failed {way}" if trial.reason is not None else f"{trial.rate:.3g} GB/s {way}"


def _advised(reason: Reason) -> Reason:
    if reason.code != DeadlineExceeded.code or reason.remedy:
        return reason
    return msgspec.structs.replace(reason, remedy="if the link is just slow: more --seconds, or less --size")


def _kind(facts: dict[str, Any]) -> str:
    reach = "across hosts" if facts["cross_host"] else "within this host"
    trust = "authenticated" if facts["authenticated"] else "trusts the fabric"
    return f"{reach}, {trust}, {'/'.join(facts['memory'])}, at {facts['place'] or facts['address']}"


def describe(transport: Transport) -> dict[str, Any]:
    can = transport.capabilities
    return {
        "usable": True,
        "address": transport.address,
        "place": place(transport.address) or None,
        "memory": sorted(can.memory),
        "cross_host": can.cross_host,
        "authenticated": can.authenticated,
        "revocable": can.revocable,
        "preference": can.preference,
    }


def as_facts(trial: Trial) -> dict[str, Any]:
    return {
        "direction": "there" if trial.outward else "back",
        "bytes": trial.length,
        "seconds": trial.seconds,
        "connect_seconds": trial.connecting,
        "gb_per_second": trial.rate,
        "reason": trial.reason,
    }
