"""One running engine: prefill by length and batch, decode by batch and context.

Every prompt begins in its own way, so no prefix cache helps where prefill is measured. Where decode is, prompts come
again, for what matters there is that they are cached.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from deeplink import __version__
from deeplink.errors import LocalError
from deeplink.local import client
from deeplink.measure import points, streams
from deeplink.solver.estimates.rates import Measurement, Phase
from deeplink.solver.kinds import KINDS, Kind

Progress = Callable[[str], None]
STEPS = 24
"""Tokens of each answer where decode is measured, beyond what other prompts' prefill takes from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`chip`, `model`, `tp` and `engine` are what the rows say, the last as the endpoint does where it is empty. Each
    point is measured `repeats` times; `most` is how long a prompt and its answer may be, in tokens."""

    url: str
    chip: str
    model: str
    tp: int = 1
    engine: Kind | Literal[""] = ""
    prompts: tuple[int, ...] = (128, 256, 512, 1024)
    batches: tuple[int, ...] = (1, 2, 4)
    contexts: tuple[int, ...] = (128, 512, 1024)
    repeats: int = 3
    most: int = 0
    key: str = ""
    seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class Served:
    """What the endpoint says of itself: its model's name, the most tokens of a request, 0 if it does not say, and which
    kind of engine it is, "" if it does not say or it is another."""

    name: str
    most: int
    engine: Kind | Literal[""] = ""


class _Listed(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None
    owned_by: Any = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Listed]


def served(url: str, key: str = "") -> Served:
    """Raises LocalError for an endpoint that cannot be reached, or serves no model."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # what is no port, or half an IPv6 address
        known = None
    if not known:
        raise LocalError(f"{url} is not the URL of an endpoint", remedy="give one such as http://127.0.0.1:8000")
    where = f"{url}/v1/models"
    try:
        listed = msgspec.json.decode(client.get(where, key), type=_Models).data
    except (msgspec.DecodeError, RecursionError) as exc:
        raise LocalError(
            f"{where} does not list models: {exc}", remedy="name the endpoint of an engine that serves OpenAI's API"
        ) from exc
    if not listed or not listed[0].id:
        raise LocalError(f"{where} lists no model", remedy="load one into the engine, or name another")
    engine: Kind | Literal[""] = next((kind for kind in KINDS if kind == listed[0].owned_by), "")
    return Served(listed[0].id, max(listed[0].max_model_len or 0, 0), engine)


def measure(plan: Plan, progress: Progress) -> Iterator[Measurement]:
    """A row for every repeat of every point, as it is measured. What is too long for the engine is left out, and
    `progress` says so. Raises LocalError."""
    found = served(plan.url, plan.key)
    most = min(size for size in (plan.most, found.most, 1 << 30) if size)
    date = datetime.date.today().isoformat()
    source = f"deeplink {__version__} measure, {date}, {found.name}"
    runner = _Runner(plan, found.name, plan.engine or found.engine, source)
    runner.warm(min(plan.prompts + plan.contexts + (most // 2,)))
    for length in sorted(plan.prompts):
        for batch in sorted(plan.batches):
            if length + 1 > most:
                progress(f"prefill of {length} tokens is left out: the engine takes {most}")
                break
            yield from runner.prefill(length, batch, progress)
    for context in sorted(plan.contexts):
        for batch in sorted(plan.batches):
            if context + runner.answer(batch) > most:
                progress(f"decode at {context} tokens is left out: the engine takes {most}")
                break
            yield from runner.decode(context, batch, progress)


@dataclass(slots=True)
class _Runner:
    plan: Plan
    name: str
    engine: Kind | Literal[""]
    source: str

    def answer(self, batch: int) -> int:
        """While a prompt is prefilled those before it may already decode."""
        return STEPS + 2 * batch

    def warm(self, length: int) -> None:
        self._run([prompt(length)], 4)

    def prefill(self, length: int, batch: int, progress: Progress) -> Iterator[Measurement]:
        for _ in range(self.plan.repeats):
            seconds = points.prefill(self._run([prompt(length) for _ in range(batch)], 1))
            progress(f"prefill of {batch} x {length}: {seconds * 1e3:.1f} ms")
            yield self._row("prefill", batch, length, 0.0, seconds)

    def decode(self, context: int, batch: int, progress: Progress) -> Iterator[Measurement]:
        prompts = [prompt(context) for _ in range(batch)]
        answer = self.answer(batch)
        # The middle of the steps differs a little from time to time; rows of one point have to have one context.
        place = 0.0
        for repeat in range(self.plan.repeats):
            seconds, middle = points.decode(self._run(prompts, answer))
            place = place if repeat else round(context + middle)
            progress(f"decode of {batch} at {place:.0f}: {seconds * 1e3:.2f} ms")
            yield self._row("decode", batch, 1, place, seconds)

    def _run(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[streams.Stream]:
        bodies = [streams.body(self.name, one, tokens) for one in prompts]
        return streams.together(self.plan.url, bodies, key=self.plan.key, seconds=self.plan.seconds)

    def _row(self, phase: Phase, requests: int, tokens: int, context: float, seconds: float) -> Measurement:
        plan = self.plan
        return Measurement(
            chip=plan.chip,
            model=plan.model or self.name,
            tp=plan.tp,
            phase=phase,
            requests=requests,
            tokens=tokens,
            context=context,
            seconds=float(f"{seconds:.6g}"),
            source=self.source,
            engine=self.engine,
        )


def prompt(length: int) -> list[int]:
    """Random tokens that every vocabulary has, so that no two prompts begin alike."""
    return [100 + secrets.randbelow(1000) for _ in range(length)]
