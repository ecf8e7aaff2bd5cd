"""deeplink.toml of the router, with the placement's weights, and of its engines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from itertools import pairwise

from deeplink.solver.emit.members import Member, of_entry
from deeplink.solver.kinds import DEFAULT
from deeplink.solver.placement import Bucket, Placement

_DIGITS = 6


def router(
    placement: Placement,
    members: tuple[Member, ...],
    urls: Mapping[str, str],
    *,
    host: str = "",
    port: int,
    secret: str = "",
) -> str:
    """`urls` are the engines' OpenAI endpoints by name; `secret` is the path of the secret's file, "" for the usual."""
    lines = [f"# {placement.name}: {placement.model}, {placement.objective} {placement.value:g} {placement.unit}"]
    lines += [f"secret_file = {_text(secret)}"] if secret else []
    lines += ["", "[router]", *([f"host = {_text(host)}"] if host else []), f"port = {port}"]
    for member in members:
        lines += ["", "[[engines]]", f"name = {_text(member.name)}", f"url = {_text(urls[member.name])}"]
        lines += ['kind = "plain"'] if _is_plain(member) else []
    for up_to, prefill, decode, weight in routes(placement, members):
        lines += ["", "[[routes]]", *([f"up_to = {up_to}"] if up_to else [])]
        lines += [f"prefill = {json.dumps(prefill)}", f"decode = {json.dumps(decode)}", f"weight = {weight:g}"]
    return "\n".join(lines) + "\n"


def _is_plain(member: Member) -> bool:
    """Whether it has nothing of deeplink that the router could ask: of SGLang and LMDeploy those that serve alone."""
    return member.engine.role == "both" and member.engine.kind != DEFAULT


def engine(member: Member, *, host: str, secret: str = "") -> str:
    """What one engine reads; `host` is where its peers reach it."""
    lines = [f"# {member.name}"]
    lines += [f"secret_file = {_text(secret)}"] if secret else []
    lines += ["", "[kv]", f"host = {_text(host)}"]
    lines += [f"casts = {json.dumps(member.engine.casts)}"] if member.engine.casts else []
    return "\n".join(lines) + "\n"


Route = tuple[int, tuple[str, ...], tuple[str, ...], float]
"""Longest prompt (0 for any), engines that prefill, engines that decode, share of the requests of that length."""


def routes(placement: Placement, members: tuple[Member, ...]) -> list[Route]:
    """The placement's flows as the router knows them: by the prompt's length, for the answer's is not known before.
    None where all requests go the same way, and through all engines."""
    names = of_entry(members)
    uppers = dict(zip((bucket.name for bucket in placement.buckets), _uppers(placement.buckets), strict=True))
    shares: dict[tuple[int, str, str], float] = {}
    for route in placement.routes:
        key = uppers[route.bucket], route.prefill, route.decode
        shares[key] = shares.get(key, 0.0) + route.rate
    ways = {(prefill, decode) for _, prefill, decode in shares}
    if len(ways) == 1 and set(next(iter(ways))) == names.keys():
        return []
    total = {upper: sum(rate for key, rate in shares.items() if key[0] == upper) for upper, _, _ in shares}
    return [
        (upper, names[prefill], names[decode], float(f"{rate / total[upper]:.{_DIGITS}g}"))
        for (upper, prefill, decode), rate in sorted(shares.items(), key=lambda item: (item[0][0] or math.inf, item[0]))
        if rate > 0
    ]


def _uppers(buckets: tuple[Bucket, ...]) -> Iterator[int]:
    """The longest prompt of each bucket, 0 for that of the longest. Between buckets of one length each, the geometric
    mean: the router estimates a prompt's tokens, and may well be wrong by some."""
    sizes = sorted({bucket.longest or bucket.prompt for bucket in buckets})
    ends = {sizes[-1]: 0}
    for small, large in pairwise(sizes):
        known = any(bucket.longest == small for bucket in buckets)
        ends[small] = max(1, round(small if known else math.sqrt(small * large)))
    for bucket in buckets:
        yield ends[bucket.longest or bucket.prompt]


def _text(value: str) -> str:
    """A TOML string; JSON's escapes are a part of TOML's."""
    return json.dumps(value)
