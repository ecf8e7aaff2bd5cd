"""A request of each length through a placement that runs, and whether it went a way of the placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deeplink.errors import LocalError
from deeplink.local import client
from deeplink.solver.emit.members import Member
from deeplink.solver.placement import Placement

_WORDS = ("the", "and", "for", "you", "are", "not", "was", "all", "can", "one", "our", "out", "day", "get", "has")
"""Of three letters, and so common that most vocabularies have each with its space as one token."""


@dataclass(frozen=True, slots=True)
class Checked:
    """One request through the router: how it went, and how it was to go."""

    bucket: str
    prompt: int
    path: str
    prefill: str
    decode: str
    tokens: int
    ttft_ms: float
    failed: str = ""


def check(url: str, placement: Placement, members: Sequence[Member], most: int, new_tokens: int = 8) -> list[Checked]:
    """To the router at `url`, with `most` tokens at most. `failed` says what was not as planned: an error is an answer
    too."""
    # LMDeploy's completions take no token ids.
    texts = any(member.engine.kind == "lmdeploy" for member in members)
    found = []
    for index, bucket in enumerate(placement.buckets):
        size = min(round(bucket.prompt), most)
        prompt = text(size, index) if texts else token_ids(size, index)
        found.append(_check(url, placement, members, bucket.name, size, prompt, new_tokens))
    return found


def _check(
    url: str,
    placement: Placement,
    members: Sequence[Member],
    bucket: str,
    size: int,
    prompt: str | Sequence[int],
    new_tokens: int,
) -> Checked:
    body: dict[str, Any] = {
        "model": placement.model,
        "prompt": prompt,
        "max_tokens": new_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    try:
        answer = client.ask(url, "/v1/completions", body)
    except LocalError as exc:
        return Checked(bucket, size, "", "", "", 0, 0.0, str(exc))
    path, prefill, decode = (answer.headers.get(f"x-deeplink-{name}", "") for name in ("path", "prefill", "decode"))
    tokens = len(answer.token_ids) or answer.completion_tokens  # not every engine tells the ids
    failed = ""
    if tokens != new_tokens:
        failed = f"{tokens} tokens instead of {new_tokens}"
    elif not _planned(placement, members, bucket, prefill, decode, path):
        failed = "not a way of the placement"
    return Checked(bucket, size, path, prefill, decode, tokens, round(answer.ttft_ms, 3), failed)


def _planned(
    placement: Placement, members: Sequence[Member], bucket: str, prefill: str, decode: str, path: str
) -> bool:
    entry = {member.name: member.engine.name for member in members}
    one = prefill or decode
    ways = {(route.prefill, route.decode) for route in placement.routes if route.bucket == bucket}
    split = entry.get(one) != entry.get(decode)
    return (entry.get(one), entry.get(decode)) in ways and path == ("handoff" if split else "plain")


def token_ids(count: int, seed: int) -> Sequence[int]:
    """A prompt of exactly `count` tokens that shares no block with that of another seed. The ids are below 1,100, which
    every vocabulary has."""
    return [100 + (seed * 7919 + index * 7) % 1000 if index else 100 + seed % 1000 for index in range(count)]


def text(count: int, seed: int) -> str:
    """A prompt of `count` tokens or about that, which begins otherwise than that of another seed."""
    stride = 1 + seed // len(_WORDS)
    return " ".join(_WORDS[(seed + index * stride) % len(_WORDS)] for index in range(count))
