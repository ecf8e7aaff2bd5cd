"""What handing over adds to a request, and how fast the cache travels, between the engines behind a router.

The first token of a request through the router takes as long as prefill, the handoff and one decode step. Prefill is
measured at its engine alone and the step in the answer, so what is left is the handoff as a client sees it: the
transfer, and a fixed part (tickets, the router, scheduling). How fast the cache travels is what the decode engine's
control endpoint says of each handoff: bytes, and milliseconds from the claim to the cache being loaded.

Engines are left alone before each request, for they do not rest at once: a vLLM worker looks for its next step with a
whole core for a second after its last. Where two engines share a processor, prefill would have that core less, and the
handoff would be charged with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from deeplink import secret as secrets
from deeplink.config import Config
from deeplink.errors import LocalError
from deeplink.local import client
from deeplink.measure import points, streams
from deeplink.measure.engine import STEPS, Progress, prompt, served

REST = 2.0
"""Seconds without requests after which engines are at rest."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """One handoff of `tokens` tokens: bytes, seconds from claim to loaded, and what it added to the time to first
    token, in seconds."""

    prefill: str
    decode: str
    tokens: int
    kv_bytes: int
    seconds: float
    added: float


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes a second, one way, and seconds that every handoff takes besides."""

    prefill: str
    decode: str
    rate: float
    latency: float

    def as_toml(self) -> str:
        """For a fleet file; `from` and `to` are to be its pools."""
        return (
            f'[[links]]\nfrom = "{self.prefill}"\nto = "{self.decode}"\ngb_per_s = {self.rate / 1e9:.4g}\n'
            f'convention = "one-way"\nper = "link"\nlatency_ms = {self.latency * 1e3:.4g}\n'
        )


class _Said(msgspec.Struct, frozen=True):
    """What the decode engine's control endpoint says of a handoff."""

    state: str
    kv_bytes: int = 0
    milliseconds: float = 0.0


def measure(
    url: str,
    config: Config,
    lengths: Sequence[int],
    repeats: int,
    progress: Progress,
    *,
    seconds: float = 300.0,
    rest: float = REST,
) -> Iterator[Handoff]:
    """Handoffs of these lengths through the router at `url`, which serves the engines of `config`; `rest` seconds
    before each request. Raises LocalError, also when a request is not handed over."""
    name = served(url).name
    engines = {engine.name: engine for engine in config.engines}
    token = secrets.control_token(secrets.load(config.secret_file))
    alone: dict[tuple[str, int], float] = {}

    def ask(where: str, size: int, tokens: int) -> streams.Stream:
        time.sleep(rest)
        (found,) = streams.together(where, [streams.body(name, prompt(size), tokens)], seconds=seconds)
        return found

    def first(where: str, size: int) -> float:
        if (where, size) not in alone:
            alone[where, size] = median(points.prefill([ask(where, size, 1)]) for _ in range(repeats))
        return alone[where, size]

    ask(url, min(lengths), 2)
    for size in sorted(lengths):
        for _ in range(repeats):
            found = ask(url, size, STEPS)
            prefill, decode, handoff = (
                found.headers.get(f"x-deeplink-{part}", "") for part in ("prefill", "decode", "handoff")
            )
            if not handoff or prefill not in engines or decode not in engines:
                raise LocalError(
                    f"a prompt of {size} tokens was not handed over",
                    remedy="name a router whose engines prefill and decode apart, and its deeplink.toml",
                )
            step, _ = points.decode([found])
            said = _said(f"{engines[decode].control}/v1/handoffs/{handoff}", token)
            added = found.tokens[0] - found.sent - first(engines[prefill].url, size) - step
            one = Handoff(prefill, decode, size, said.kv_bytes, said.milliseconds / 1e3, added)
            sent = f"{one.kv_bytes / 1e6:.2f} MB in {one.seconds * 1e3:.1f} ms"
            progress(f"handoff of {size}: {sent}, adds {added * 1e3:.1f} ms")
            yield one


def _said(url: str, token: str) -> _Said:
    try:
        said = msgspec.json.decode(client.get(url, token), type=_Said)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise LocalError(
            f"{url} does not say what became of the handoff: {exc}",
            remedy="see that control of [[engines]] is the engine's control endpoint",
        ) from exc
    if said.state != "loaded" or said.kv_bytes <= 0:
        raise LocalError(
            f"a handoff was not loaded: {url} says it is {said.state}, with {said.kv_bytes} bytes",
            field="state",
            ours="loaded",
            theirs=said.state,
            remedy="its record there, and the engines' logs, say why",
        )
    return said


def links(found: Sequence[Handoff]) -> Iterator[Link]:
    """The link of each pair of engines. Where all handoffs took about as long, the rate is at least what the largest
    reached."""
    for prefill, decode in dict.fromkeys((one.prefill, one.decode) for one in found):
        mine = [one for one in found if (one.prefill, one.decode) == (prefill, decode)]
        _, each = points.line([one.kv_bytes for one in mine], [one.seconds for one in mine])
        largest = max(mine, key=lambda one: one.kv_bytes)
        rate = 1 / each if each > 0 else largest.kv_bytes / max(largest.seconds, 1e-6)
        latency = max(median(one.added - one.kv_bytes / rate for one in mine), 0.0)
        yield Link(prefill, decode, rate, latency)
