"""Requests through engines, event by event: what a placement really does with a trace.

An engine prefills one prompt at a time, first come first served, and decodes what has a place in its batch and room in
its cache. Where it does both at once, prefill gets `part` of the time and decode steps take as much longer. Between
events nothing changes but the progress of both, so an engine is brought up to date only when something happens to it:
a request is a handful of events however long its answer is.

A request that starts to decode waits for the step that is under way. The step's time is that of the batch and of the
tokens in the cache, as it is when the batch last changed.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from deeplink.solver.fleets.fleet import Request
from deeplink.solver.simulator.engine import EPSILON, Engine, Group

__all__ = ["Group", "Policy", "Result", "Way", "simulate"]

Policy = Literal["least", "shared"]


@dataclass(frozen=True, slots=True)
class Way:
    """`weight` of a bucket's requests goes from group `prefill` to group `decode`; the same group for both where one
    engine does it all. Handing over takes `latency` plus `per_token` for each token of the prompt, and occupies `link`
    (if any) for `occupied` seconds a token."""

    prefill: int
    decode: int
    weight: float
    latency: float = 0.0
    per_token: float = 0.0
    link: int | None = None
    occupied: float = 0.0


@dataclass(slots=True)
class Result:
    """By request, in the trace's order: seconds to the first token, and seconds for each further token (0 where there
    is none). `busy` is the part of the time that each group's engines had work, `ended` when the last token came."""

    first: list[float]
    further: list[float]
    busy: list[float]
    ended: float
    events: int

    def attained(self, ttft: float, tpot: float) -> float:
        """The part of the requests that met both."""
        met = sum(1 for a, b in zip(self.first, self.further, strict=True) if a <= ttft and b <= tpot)
        return met / len(self.first)

    def percentile(self, share: float, *, further: bool = False) -> float:
        values = sorted(value for value in self.further if value > 0) if further else sorted(self.first)
        return values[min(len(values) - 1, math.ceil(share * len(values)) - 1)] if values else 0.0


def simulate(
    requests: Sequence[Request],
    groups: Sequence[Group],
    ways: Sequence[Sequence[Way]],
    bucket: Callable[[Request], int],
    *,
    links: int = 0,
    policy: Policy = "least",
    seed: int = 0,
) -> Result:
    """Every request through the engines of one of its bucket's ways, drawn by weight.

    `policy` says which engine of a group gets it: the one with the fewest open requests, as the router does it, or the
    first that is free, from one queue for the group, as theory has it.
    """
    return _Run(requests, groups, ways, bucket, links, policy, seed).run()


class _Run:
    def __init__(
        self,
        requests: Sequence[Request],
        groups: Sequence[Group],
        ways: Sequence[Sequence[Way]],
        bucket: Callable[[Request], int],
        links: int,
        policy: Policy,
        seed: int,
    ) -> None:
        self.requests = requests
        self.groups = groups
        self.ways = ways
        self.bucket = bucket
        self.shared = policy == "shared"
        self.draw = random.Random(seed)
        self.engines = [[Engine(index, group) for _ in range(group.count)] for index, group in enumerate(groups)]
        self.queues: list[deque[int]] = [deque() for _ in groups]
        self.free: list[list[Engine]] = [list(reversed(engines)) for engines in self.engines]
        self.free_at = [0.0] * links
        self.cumulated = [self._cumulated(mine) for mine in ways]
        self.way: list[Way | None] = [None] * len(requests)
        self.first = [0.0] * len(requests)
        self.further = [0.0] * len(requests)
        self.heap: list[tuple[float, int, int, int, Engine | None]] = []
        self.order = 0
        self.events = 0
        self.now = 0.0

    @staticmethod
    def _cumulated(ways: Sequence[Way]) -> list[float]:
        total, sums = 0.0, []
        for way in ways:
            total += way.weight
            sums.append(total)
        return [value / total for value in sums] if total else sums

    def run(self) -> Result:
        heap, requests = self.heap, self.requests
        upcoming = 0
        while upcoming < len(requests) or heap:
            if upcoming < len(requests) and (not heap or requests[upcoming].at <= heap[0][0]):
                self.now = requests[upcoming].at
                self._arrive(upcoming)
                upcoming += 1
                continue
            self.now, _, what, version, engine = heapq.heappop(heap)
            self.events += 1
            if engine is None:
                self._arrived_for_decode(what)
            elif version == engine.version:
                self._ended(engine)
        ended = self.now
        busy = [
            sum(engine.busy for engine in engines) / (len(engines) * ended) if engines and ended else 0.0
            for engines in self.engines
        ]
        return Result(self.first, self.further, busy, ended, self.events)

    def _push(self, at: float, what: int, version: int, engine: Engine | None) -> None:
        self.order += 1
        heapq.heappush(self.heap, (at, self.order, what, version, engine))

    def _plan(self, engine: Engine) -> None:
        """What ends next there."""
        engine.version += 1
        soon = engine.next()
        if soon < math.inf:
            self._push(soon, -1, engine.version, engine)

    def _arrive(self, index: int) -> None:
        bucket = self.bucket(self.requests[index])
        ways = self.ways[bucket]
        if len(ways) == 1:
            way = ways[0]
        else:
            drawn = self.draw.random()
            way = next(w for w, until in zip(ways, self.cumulated[bucket], strict=True) if drawn <= until + EPSILON)
        self.way[index] = way
        if self.shared:
            free = self.free[way.prefill]
            if not free:
                self.queues[way.prefill].append(index)
                return
            engine = free.pop()
        else:
            engine = min(self.engines[way.prefill], key=_open)
        engine.open += 1
        engine.advance(self.now)
        if engine.current >= 0:
            engine.prompts.append(index)
        else:
            self._begin(engine, index)
            self._plan(engine)

    def _begin(self, engine: Engine, index: int) -> None:
        request = self.requests[index]
        engine.current = index
        engine.work = engine.of.prefill(max(request.prompt - request.cached, 1))

    def _arrived_for_decode(self, index: int) -> None:
        way = self.way[index]
        assert way is not None
        engine = min(self.engines[way.decode], key=_open)
        engine.open += 1
        engine.advance(self.now)
        self._admit(engine, index)
        self._plan(engine)

    def _admit(self, engine: Engine, index: int | None) -> None:
        """Those that wait, in order, as far as there are places and room."""
        if index is not None:
            engine.waiting.append(index)
        while engine.waiting and len(engine.ends) < engine.of.batch:
            request = self.requests[engine.waiting[0]]
            if engine.ends and engine.cached + request.prompt + request.output > engine.of.room:
                break
            entered = engine.waiting.popleft()
            heapq.heappush(engine.ends, (math.ceil(engine.steps - EPSILON) + request.output, entered))
            engine.cached += request.prompt
            engine.pace()
            way = self.way[entered]
            assert way is not None
            if way.prefill == way.decode:
                self.first[entered] = self.now - request.at
            else:  # the first token comes out of the step that begins next
                self.first[entered] = (
                    self.now - request.at + engine.seconds * (math.ceil(engine.steps) - engine.steps + 1)
                )

    def _ended(self, engine: Engine) -> None:
        engine.advance(self.now)
        if engine.current >= 0 and engine.work <= EPSILON * max(self.now, 1.0):
            self._prefilled(engine)
        changed = False
        while engine.ends and engine.ends[0][0] <= engine.steps + 1e-9 * max(engine.steps, 1.0):
            _, index = heapq.heappop(engine.ends)
            self._finished(engine, index)
            changed = True
        if changed:
            if not engine.ends:
                engine.steps, engine.cached = 0.0, 0.0
            self._admit(engine, None)
            engine.pace()
        self._plan(engine)

    def _prefilled(self, engine: Engine) -> None:
        index, engine.current = engine.current, -1
        request, way = self.requests[index], self.way[index]
        assert way is not None
        if way.decode == way.prefill:
            if request.output > 1:
                self._admit(engine, index)
            else:
                self.first[index] = self.now - request.at
                engine.open -= 1
        else:
            engine.open -= 1
            begin = self.now
            if way.link is not None:
                begin = max(begin, self.free_at[way.link])
                self.free_at[way.link] = begin + way.occupied * request.prompt
            self._push(begin + way.latency + way.per_token * request.prompt, index, 0, None)
        queue = self.queues[engine.group] if self.shared else engine.prompts
        if queue:
            if self.shared:
                engine.open += 1
            self._begin(engine, queue.popleft())
        elif self.shared:
            self.free[engine.group].append(engine)

    def _finished(self, engine: Engine, index: int) -> None:
        request = self.requests[index]
        engine.open -= 1
        engine.cached -= request.prompt + request.output
        if request.output > 1:
            self.further[index] = (self.now - request.at - self.first[index]) / (request.output - 1)


def _open(engine: Engine) -> int:
    return engine.open
