"""Put a request through the running engines and find out, from the engines themselves, what became of it."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deeplink.kvconnector.contracts import contract as contracts
from deeplink.kvconnector.contracts.contract import Contract
from deeplink.kvconnector.contracts.negotiate import Refusal, negotiate
from deeplink.local import client
from deeplink.local.client import Answer
from deeplink.local.engines import Engine
from deeplink.local.kinds import Kind
from deeplink.local.prompts import NEW_TOKENS, Prompt
from deeplink.local.report import HANDOFF, Judged, Leaks, RequestFacts

SETTLE_SECONDS = 5.0
_POLL_SECONDS = 0.05
_ENDED = {"loaded", "recompute", "drained", "aborted", "expired", "failed"}
_SOURCES = re.compile(r'^vllm:prompt_tokens_by_source_total\{[^}]*source="(\w+)"[^}]*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Stack:
    """Two running engines and the router in front; `token` opens their control endpoints.

    `alone` is the decode engine, or one like it where that serves nothing but what is handed to it; `kind` is theirs.
    """

    prefill: Engine
    decode: Engine
    alone: Engine
    kind: Kind
    router_url: str
    token: str


def agreement(stack: Stack) -> tuple[Contract, Contract, str]:
    """Both contracts and what `negotiate` makes of them. Raises Refused if they cannot hand over."""
    prefill, decode = (
        contracts.decode(client.get(f"{engine.control}/v1/contract", stack.token, accept="application/msgpack"))
        for engine in (stack.prefill, stack.decode)
    )
    result = negotiate(prefill, decode)
    if isinstance(result, Refusal):
        raise result.error(stack.prefill.name, stack.decode.name)
    return prefill, decode, "exact" if result.exact else "lossy"


def measure(stack: Stack, prompt: Prompt, on_text: Callable[[str], None] = lambda _: None) -> Judged:
    """One request through the router, then the same prompt to the decode engine alone.

    Nothing else may use the engines meanwhile: the counters of the decode engine are read before and after.
    """
    body = prompt.body(stack.decode.served_name, ids=stack.kind.ids)
    before = _prompt_tokens(stack.decode) if stack.kind.counts else {}
    answer = client.ask(stack.router_url, prompt.path, body, on_text)
    # vLLM computes the last token of a prompt itself; who does not count goes on from all of it.
    wanted = answer.prompt_tokens - 1 if stack.kind.counts else answer.prompt_tokens
    loaded = _wait_counted(stack.decode, before, answer.prompt_tokens) if stack.kind.counts else None
    handoff = answer.headers.get("x-deeplink-handoff", "")
    producer = _handoff(stack, stack.prefill, handoff)
    consumer = _handoff(stack, stack.decode, handoff)
    # The salt is part of every block's key, so nothing that was handed over can be found in the prefix cache.
    alone = client.ask(stack.alone.url, prompt.path, body | {"cache_salt": uuid.uuid4().hex})
    return Judged(
        prompt.name,
        RequestFacts(
            prompt_tokens=answer.prompt_tokens,
            path=_path(answer, wanted, consumer.get("tokens", 0) if loaded is None else loaded),
            kv_bytes=consumer.get("kv_bytes", 0),
            handoff_ms=round(consumer.get("milliseconds", 0.0), 3),
            ttft_ms=round(answer.ttft_ms, 3),
            digest=consumer.get("digest", ""),
            tokens_equal=_complete(answer, prompt) and _said(answer) == _said(alone),
        ),
        producer_digest=producer.get("digest", ""),
        producer_state=_state(producer),
        consumer_state=_state(consumer),
    )


def leaks(stack: Stack) -> Leaks:
    """What both engines hold one second from now."""
    time.sleep(1)
    held = [client.get_json(f"{engine.control}/v1/status", stack.token) for engine in (stack.prefill, stack.decode)]
    return Leaks(
        blocks=sum(status["blocks"]["held"] for status in held),
        staging_bytes=sum(status["staging"]["used"] for status in held),
        claims=sum(status["claims"] for status in held),
    )


def _complete(answer: Answer, prompt: Prompt) -> bool:
    count = len(answer.token_ids) or answer.completion_tokens
    return count == NEW_TOKENS if prompt.whole else count > 0


def _said(answer: Answer) -> tuple[list[int], str]:
    """Where an engine says no token ids the text has to do."""
    return answer.token_ids, answer.text


def _path(answer: Answer, wanted: int, loaded: int) -> str:
    """What the router says, unless the decode engine's own count contradicts it."""
    said = answer.headers.get("x-deeplink-path", "not said by the router")
    if said == HANDOFF and loaded != wanted:
        return f"handoff of {loaded} instead of {wanted} tokens"
    return said


def _prompt_tokens(engine: Engine) -> dict[str, int]:
    """How many prompt tokens the engine has had so far, by where their KV came from."""
    text = client.get(f"{engine.url}/metrics", accept="text/plain").decode()
    return {source: int(float(value)) for source, value in _SOURCES.findall(text)}


def _wait_counted(engine: Engine, before: dict[str, int], prompt_tokens: int) -> int:
    """Prompt tokens loaded from outside since `before`. Counted a little after the answer."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        now = _prompt_tokens(engine)
        counted = sum(now.values()) - sum(before.values())
        if counted >= prompt_tokens or time.monotonic() > deadline:
            source = "external_kv_transfer"
            return now.get(source, 0) - before.get(source, 0)
        time.sleep(_POLL_SECONDS)


def _handoff(stack: Stack, engine: Engine, handoff: str) -> dict[str, Any]:
    """The engine's account of a handoff once it has ended; empty when there was none."""
    if not handoff:
        return {}
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        status = client.get_json(f"{engine.control}/v1/handoffs/{handoff}", stack.token)
        if status["state"] in _ENDED or time.monotonic() > deadline:
            return status
        time.sleep(_POLL_SECONDS)


def _state(status: dict[str, Any]) -> str:
    state = str(status.get("state", "none"))
    reason = status.get("reason")
    return f"{state} ({reason['message']})" if reason else state
