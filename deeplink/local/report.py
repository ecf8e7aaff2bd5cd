"""What the demo found, and which of its checks failed. Pure: facts in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from rich.table import Table

from deeplink.kvconnector.contracts.contract import Contract

HANDOFF = "handoff"
WIDE = ("float32",)
"""Element types in which two engines choose the same tokens, however each computes them."""


class EngineFacts(msgspec.Struct, frozen=True):
    """One engine by its own contract."""

    engine: str
    version: str
    chip: str
    dtype: str
    block_size: int
    layout: str


class RequestFacts(msgspec.Struct, frozen=True):
    """One request by what the engines say of it.

    `path` is "handoff" only if the router says so and the decode engine counted every prompt token (vLLM: but the
    last) as loaded from outside. `ttft_ms` is measured by the client, to the first token; an answer that is
    not streamed has it when it has all. `tokens_equal` compares with the decode engine's answer to the same
    prompt alone.
    """

    prompt_tokens: int
    path: str
    kv_bytes: int
    handoff_ms: float
    ttft_ms: float
    digest: str
    tokens_equal: bool


class Judged(msgspec.Struct, frozen=True):
    """A request with what is needed to judge it and not to report it."""

    name: str
    facts: RequestFacts
    producer_digest: str
    producer_state: str
    consumer_state: str


class Leaks(msgspec.Struct, frozen=True):
    """What both engines still hold one second after the last answer."""

    blocks: int
    staging_bytes: int
    claims: int


class Report(msgspec.Struct, frozen=True):
    prefill: EngineFacts
    decode: EngineFacts
    agreement: str
    requests: tuple[RequestFacts, ...]
    leaks: Leaks


def engine_facts(contract: Contract) -> EngineFacts:
    group = contract.groups[0]
    return EngineFacts(
        contract.engine, contract.engine_version, contract.chip, group.dtype, group.block_size, group.layout
    )


def failed_checks(agreement: str, requests: Sequence[Judged], leaks: Leaks, dtype: str) -> list[str]:
    """The checks that did not hold, each with what was found instead.

    In an element type of 16 bits a nearly tied choice between two tokens falls either way when two engines compute in
    another order, and all that follows is another answer; so there most answers have to be equal, not each.
    """
    failed = [] if agreement == "exact" else [f"agreement: {agreement}, not exact"]
    for request in requests:
        failed += [f"{request.name}: {text}" for text in _failed(request)]
    unlike = [request.name for request in requests if not request.facts.tokens_equal]
    if dtype in WIDE or 2 * len(unlike) > len(requests):
        failed += [f"{name}: tokens_equal: the decode engine alone answers with other tokens" for name in unlike]
    for name in leaks.__struct_fields__:
        if held := getattr(leaks, name):
            failed.append(f"leaks.{name}: {held} still held after the last answer")
    return failed


def _failed(request: Judged) -> Iterable[str]:
    facts = request.facts
    if facts.path != HANDOFF:
        yield f"path: {facts.path}"
    if request.consumer_state != "loaded" or request.producer_state != "drained":
        yield (f"state: prefill {request.producer_state}, decode {request.consumer_state}")
    if not facts.digest or facts.digest != request.producer_digest:
        yield f"digest: prefill {request.producer_digest or 'none'}, decode {facts.digest or 'none'}"


def to_json(report: Report) -> str:
    """One line."""
    return msgspec.json.encode(report).decode()


def engines_table(prefill: EngineFacts, decode: EngineFacts, agreement: str) -> Table:
    table = Table(title=f"two engines, one cache: {agreement}")
    for column in ("", "prefill", "decode"):
        table.add_column(column)
    for name in EngineFacts.__struct_fields__:
        table.add_row(name.replace("_", " "), str(getattr(prefill, name)), str(getattr(decode, name)))
    return table


def requests_table(requests: Iterable[Judged]) -> Table:
    table = Table(title="requests: prefilled by one engine, decoded by the other")
    for column in ("request", "path"):
        table.add_column(column)
    for column in ("tokens", "KV bytes", "handoff ms", "TTFT ms"):
        table.add_column(column, justify="right")
    for column in ("digest", "equal to decode alone"):
        table.add_column(column)
    for request in requests:
        facts = request.facts
        table.add_row(
            request.name,
            facts.path,
            str(facts.prompt_tokens),
            f"{facts.kv_bytes:,}",
            f"{facts.handoff_ms:.1f}",
            f"{facts.ttft_ms:.0f}",
            facts.digest or "none",
            "yes" if facts.tokens_equal else "NO",
        )
    return table
