"""Another engine: its contract, what it is doing, and whether it can hand over to the others of deeplink.toml, or they
to it. A dry run: what is negotiated is what the engines and the router would, and nothing is sent to be kept."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from deeplink import lookup
from deeplink import secret as secrets
from deeplink.config import Config
from deeplink.doctor.model import Finding, Section
from deeplink.doctor.subject import Subject
from deeplink.errors import DeeplinkError, LocalError, Reason
from deeplink.kvconnector.contracts.contract import Contract
from deeplink.kvconnector.contracts.negotiate import Agreement, Refusal, negotiate
from deeplink.local import client
from deeplink.lookup import Found

UP = "start the engine, check the URL, and give both sides the same secret_file"

AT_ONCE = 16
"""Engines that are asked at one time: one that does not answer takes seconds."""


def examine(subject: Subject, engine: str, api: bool) -> Section:
    """`engine` and `api` as `lookup.find` takes them."""
    if isinstance(subject.config, DeeplinkError):
        finding = Finding(engine, "unknown", "not asked: something is wrong with the configuration, see above")
        return Section(f"peer {engine}", (finding,))
    return Section(f"peer {engine}", tuple(_findings(subject.config, engine, api)))


def _findings(config: Config, engine: str, api: bool) -> Iterator[Finding]:
    try:
        found = lookup.find(engine, config, api)
    except DeeplinkError as exc:
        yield _unread("contract", exc)
        return
    contract = found.contract
    name = f"{contract.engine} {contract.engine_version} on {contract.chip}, role {contract.role}"
    facts: dict[str, Any] = {"control": found.control or None, "contract": contract}
    yield Finding("contract", "works", name, facts=facts)
    if found.control:
        yield _status(found, config)
    yield from _pairs(engine, contract, config)


def _status(found: Found, config: Config) -> Finding:
    token = secrets.control_token(secrets.load(config.secret_file))
    try:
        status = client.get_json(f"{found.control}/v1/status", token)
        blocks, staging = status["blocks"], status["staging"]
        text = (
            f"{blocks['held']} of {blocks['total']} blocks held, {staging['used']} of {staging['capacity']} bytes of "
            f"staging used, {status['claims']} claims and {status['handoffs']} handoffs open"
        )
    except LocalError as exc:
        return _unread("status", exc)
    except (KeyError, TypeError) as exc:
        return _unread("status", LocalError(f"{found.control}/v1/status is not the status of an engine: {exc!r}"))
    return Finding("status", "works", text, facts={"status": status})


def _pairs(engine: str, contract: Contract, config: Config) -> Iterator[Finding]:
    """What comes of this engine with each other one of deeplink.toml."""
    met = paired = 0
    entries = [entry for entry in config.engines if entry.name != engine]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda entry: _ask(entry.control, config), entries))
    for entry, other in zip(entries, answers, strict=True):
        if isinstance(other, DeeplinkError):
            yield _unread(entry.name, other)
            continue
        if other.epoch == contract.epoch:  # itself, by another name
            continue
        met += 1
        for finding in pair(engine, contract, entry.name, other):
            paired += 1
            yield finding
    if not met:
        yield Finding("pairs", "off", "no other engine in deeplink.toml that could be asked")
    elif not paired:
        reason = Reason(
            "contract_refused",
            "no other engine in deeplink.toml has a role that goes with this one's",
            "role",
            contract.role,
            remedy="start one with role prefill and one with role decode, or with role both",
        )
        yield Finding("pairs", "failed", reason=reason)


def _ask(control: str, config: Config) -> Contract | DeeplinkError:
    try:
        return lookup.fetch([control], config).contract
    except DeeplinkError as exc:
        return exc


def pair(ours: str, contract: Contract, theirs: str, other: Contract) -> Iterator[Finding]:
    """Both directions, as far as the roles allow them."""
    for producer, first, consumer, second in ((ours, contract, theirs, other), (theirs, other, ours, contract)):
        if not (first.produces and second.consumes):
            continue
        name = f"{producer} -> {consumer}"
        facts = {"producer": producer, "consumer": consumer}
        answer = negotiate(first, second)
        if isinstance(answer, Agreement):
            yield Finding(name, "works", str(answer), facts={**facts, "agreement": answer})
        else:
            yield Finding(name, "failed", f"refused by {answer.field}", _refused(name, answer), facts)


def _refused(name: str, refusal: Refusal) -> Reason:
    reason = refusal.error("the producer", "the consumer").reason()
    return msgspec.structs.replace(reason, message=f"{name} would be refused: {refusal.field} differs")


def _unread(name: str, problem: DeeplinkError) -> Finding:
    reason = problem.reason()
    return Finding(name, "unknown", reason=msgspec.structs.replace(reason, remedy=reason.remedy or UP))
