"""A prompt that is known goes through a handoff, and through each engine alone, and the answers are compared.

The two engines compute the same with other kernels, so the same tokens have other log-probabilities at each; how far
apart is found out by asking both alone for those of the very tokens that came out of the handoff. A cache that is wrong
puts the handoff much further from either than they are from each other.
"""

from __future__ import annotations

import http.client
import json
import math
import secrets as random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from deeplink import bounded, lookup
from deeplink import secret as secrets
from deeplink.config import Config, EngineEntry
from deeplink.doctor.model import Finding, Section, reason_of
from deeplink.doctor.subject import Subject
from deeplink.errors import DeeplinkError, HandoffError, LocalError
from deeplink.kvconnector.contracts.contract import Contract
from deeplink.kvconnector.contracts.negotiate import Agreement, negotiate
from deeplink.kvconnector.handoffs import ticket as tickets

PROMPT, ANSWER = 160, 16
"""Tokens. The prompt is longer than the largest usual block, and no whole number of tiles more than it."""
SECONDS = 60.0
MAX_ANSWER = 4 << 20
FLOORS = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.2}
"""Nats by which one computation in this type may differ from another of the same by its order alone, where the engines
do not show it. With float32 the tests hold real engines to a third of that; a wrong cache is off by whole nats. Types
that are not here have 8 bits."""
FLOOR = 0.5
TIMES = 2.0
"""How much further from either engine a handoff may be than the two are from each other."""


@dataclass(frozen=True, slots=True)
class Canary:
    """What was found, position by position, in nats: the differences of the handoff from each engine alone, and of
    those from each other."""

    from_decode: tuple[float, ...]
    from_prefill: tuple[float, ...]
    apart: tuple[float, ...]
    floor: float

    @property
    def bound(self) -> float:
        return max(self.floor, TIMES * max(self.apart, default=0.0))

    @property
    def worst(self) -> float:
        """Not a number where one of the answers was none."""
        found = (*self.from_decode, *self.from_prefill)
        return math.nan if any(math.isnan(value) for value in found) else max(found)

    @property
    def good(self) -> bool:
        return self.worst <= self.bound


def examine(subject: Subject, engine: str) -> Section:
    """`engine` with each other of deeplink.toml that it agrees with. Only engines that are named there are asked, as
    only of those it is known where their API is."""
    name = f"canary {engine}"
    if isinstance(subject.config, DeeplinkError):
        return Section(name, (Finding("canary", "off", "something is wrong with the configuration"),))
    return Section(name, tuple(_findings(engine, subject.config)) or (Finding("canary", "off", "no pair to try"),))


def _findings(engine: str, config: Config) -> Iterator[Finding]:
    entries = {entry.name: entry for entry in config.engines if entry.kind == "deeplink"}
    if engine not in entries:
        yield Finding("canary", "off", "not an engine of deeplink.toml, so it is not known where its API is")
        return
    contracts: dict[str, Contract] = {}
    for name, entry in entries.items():
        try:
            contracts[name] = lookup.fetch([entry.control], config).contract
        except DeeplinkError:
            if name == engine:
                yield Finding("canary", "off", "its contract could not be read")
                return
    for other in contracts.keys() - {engine}:
        for producer, consumer in ((engine, other), (other, engine)):
            agreement = negotiate(contracts[producer], contracts[consumer])
            if isinstance(agreement, Agreement):
                pair = _Pair(
                    entries[producer], contracts[producer], entries[consumer], contracts[consumer], agreement, config
                )
                yield _tried(pair)


@dataclass(frozen=True, slots=True)
class _Pair:
    prefill: EngineEntry
    producer: Contract
    decode: EngineEntry
    consumer: Contract
    agreement: Agreement
    config: Config


def _tried(pair: _Pair) -> Finding:
    name = f"{pair.prefill.name} -> {pair.decode.name}"
    if not (pair.producer.alone and pair.consumer.alone):
        return Finding(name, "off", "one of the two serves nothing alone, so there is nothing to compare with")
    try:
        found = _try(pair)
    except DeeplinkError as exc:
        return Finding(name, "unknown", reason=reason_of(exc))
    ours, theirs, apart = (max(values) for values in (found.from_prefill, found.from_decode, found.apart))
    text = (
        f"{len(found.apart)} tokens: log-probabilities at most {theirs:.2g} from those of {pair.decode.name} alone and "
        f"{ours:.2g} from those of {pair.prefill.name} alone, which are {apart:.2g} apart (bound {found.bound:.2g})"
    )
    facts = {
        "producer": pair.prefill.name,
        "consumer": pair.decode.name,
        "from_decode": found.from_decode,
        "from_prefill": found.from_prefill,
        "apart": found.apart,
        "bound": found.bound,
    }
    if found.good:
        return Finding(name, "works", text, facts=facts)
    reason = HandoffError(
        "a prompt that was handed over is answered otherwise than by either engine alone",
        field="log-probability",
        ours=f"{found.worst:.3g}",
        theirs=f"at most {found.bound:.3g}",
        remedy="do not use this pair, and report it with both contracts (deeplink contract show)",
    ).reason()
    return Finding(name, "failed", text, reason, facts)


def _try(pair: _Pair) -> Canary:
    prompt = _prompt(pair.producer.model.vocabulary)
    model = {side.name: _model(side.url) for side in (pair.prefill, pair.decode)}
    ticket = tickets.mint(
        tickets.issue(tickets.new_handoff(), pair.producer, pair.consumer, pair.agreement, int(SECONDS * 1000)),
        secrets.load(pair.config.secret_file),
    )
    salt = random.token_hex(8)  # so that nothing of it is in either cache

    def body(side: EngineEntry, tokens: Sequence[int], answer: int, part: str = "", **more: Any) -> dict[str, Any]:
        asked = {
            "model": model[side.name],
            "prompt": list(tokens),
            "max_tokens": answer,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }
        if part:
            asked["cache_salt"] = salt
            asked["kv_transfer_params"] = {"deeplink": {"side": part, "ticket": ticket}}
        return asked

    _choice(pair.prefill, body(pair.prefill, prompt, 1, "produce"))
    handed = _choice(pair.decode, body(pair.decode, prompt, ANSWER, "consume", logprobs=0, return_token_ids=True))
    tokens = _said(handed.get("token_ids"), int, pair.decode)
    values = _said((handed.get("logprobs") or {}).get("token_logprobs"), (int, float), pair.decode)
    alone = [
        _known(side, _choice(side, body(side, [*prompt, *tokens], 1, prompt_logprobs=0)), tokens)
        for side in (pair.decode, pair.prefill)
    ]
    kinds = {group.dtype for group in (*pair.producer.groups, *pair.consumer.groups)}
    return Canary(
        _differences(values, alone[0]),
        _differences(values, alone[1]),
        _differences(*alone),
        max(FLOORS.get(kind, FLOOR) for kind in kinds),
    )


def _prompt(vocabulary: int) -> list[int]:
    """Tokens from all over the vocabulary, but its ends, where those with a meaning of their own are."""
    low, high = vocabulary // 10, vocabulary - vocabulary // 10
    return [low + (place * 104729) % max(1, high - low) for place in range(PROMPT)]


def _model(url: str) -> str:
    """What the engine calls the model that it serves first."""
    try:
        name = _call(url, "GET", "/v1/models")["data"][0]["id"]
    except (KeyError, IndexError, TypeError) as exc:
        raise LocalError(f"{url}/v1/models is no list of models: {exc!r}") from exc
    return str(name)


def _choice(side: EngineEntry, body: Mapping[str, Any]) -> dict[str, Any]:
    answer = _call(side.url, "POST", "/v1/completions", body)
    try:
        choice = answer["choices"][0]
    except (KeyError, IndexError, TypeError) as exc:
        raise LocalError(f"{side.name} answered without a completion: {exc!r}") from exc
    if not isinstance(choice, dict):
        raise LocalError(f"{side.name} answered without a completion")
    return choice


def _known(side: EngineEntry, choice: Mapping[str, Any], tokens: Sequence[int]) -> list[float]:
    """The log-probabilities of `tokens`, which are the end of the prompt."""
    said = choice.get("prompt_logprobs")
    try:
        return [float(one[str(token)]["logprob"]) for one, token in zip(said[-len(tokens) :], tokens, strict=True)]  # type: ignore[index]
    except (KeyError, TypeError, ValueError) as exc:
        raise LocalError(f"{side.name} does not say the log-probabilities of a prompt") from exc


def _differences(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    return tuple(abs(a - b) for a, b in zip(one, other, strict=True))


def _said(values: Any, kind: type | tuple[type, ...], side: EngineEntry) -> list[Any]:
    """As many of them as the answer has tokens. Raises LocalError."""
    if not isinstance(values, list) or len(values) != ANSWER or not all(isinstance(value, kind) for value in values):
        raise LocalError(f"{side.name} does not say the tokens and log-probabilities of its answer")
    return values


def _call(url: str, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One JSON object. Raises LocalError."""
    where = f"{url}{path}"
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        with closing(kind(parts.hostname or "", parts.port, timeout=SECONDS)) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            with connection.getresponse() as response:
                status, data = response.status, bounded.read(response, MAX_ANSWER, time.monotonic() + SECONDS)
    except (OSError, http.client.HTTPException) as exc:
        raise LocalError(f"{where}: {exc!r}", remedy="start the engine, and check its url in deeplink.toml") from exc
    if len(data) > MAX_ANSWER:
        raise LocalError(f"{where} answered with more than {MAX_ANSWER} bytes")
    if status != 200:
        raise LocalError(f"{where} answered {status}: {data[:500].decode(errors='replace')}")
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise LocalError(f"{where} did not answer with JSON: {exc}") from exc
    if not isinstance(answer, dict):
        raise LocalError(f"{where} did not answer with a JSON object")
    return answer
