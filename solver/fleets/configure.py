"""Every way to run an engine on every pool, with what it can do: the fleet as a problem.

**Prefill** takes one prompt at a time. Its time is that of the prompt's new tokens, and the wait before it has a
budget, a part of the time to first token; how busy the engines may be follows from that, by a formula
(`deeplink.solver.exact.queueing`) or, where there is a trace, by replaying it (`deeplink.solver.exact.replayed`).
Several budgets are candidates of their own: a long wait allows busy engines, a short one leaves time for the transfer.

**Decode** keeps as many sequences in a step as finish it in time and fit into memory. A request takes up a place for as
many steps as it has tokens, and memory for its prompt and half its answer on average.

**Both** does it in one engine, where each step has decode's sequences and a piece of a prompt. A part of the step is
for the piece: it slows prefill down by 1 / part, and decode keeps the sequences that fit into the rest. Several parts
are candidates of their own.

An engine may take only the shorter or only the longer buckets, so that short prompts do not wait behind long ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from deeplink.solver.estimates import calibrate
from deeplink.solver.estimates.rates import Rate, Rates
from deeplink.solver.exact.problem import Candidate, Cap, Role
from deeplink.solver.exact.queueing import steps, usable, variation
from deeplink.solver.exact.replayed import Replayed
from deeplink.solver.fleets.fleet import Bucket, Fleet, Inventory
from deeplink.solver.fleets.trace import bucket_of
from deeplink.solver.kinds import DEFAULT

Shares = Callable[[int], tuple[float, ...]]

WAITS = (0.2, 0.5, 0.8)
"""Budgets for waiting before prefill, as parts of the time to first token."""
PARTS = (0.3, 0.6, 0.8)
"""Parts of an aggregated engine's step that are for prefill."""
ADMISSION = 0.05
"""Budget for waiting until a decode engine has a place, as part of the time to first token."""
BATCHES = 1024
_ACTIVATIONS = 0.03
"""Of a chip's memory, for what is neither weights nor cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a candidate's numbers mean: how its engine is started, and where they come from.

    `service[b]` is the time of prefill in seconds, alone; `step` that of a decode step of `batch` sequences. In an
    aggregated engine prefill has `part` of each step, in pieces of `chunk` tokens. `wait` is the budget for waiting
    before prefill, `mean` and `scv` are of the service there (of a place in the batch, for decode). `room` is bytes of
    cache, of which a token takes `token_bytes`. `rates` are the times that were used, prefills before the step.
    """

    pool: str
    role: Role
    tp: int
    batch: int
    chunk: int
    service: tuple[float, ...]
    step: float
    wait: float
    part: float
    mean: float
    scv: float
    room: float
    token_bytes: float
    rates: tuple[Rate, ...]
    source: Rates


def rates_of(fleet: Fleet, pool: Inventory, tp: int) -> Rates:
    """Times of a group of `tp` chips: from its own measurements, and from those of groups of other sizes on one host:
    of the network between hosts a roofline knows nothing. Times of another engine say nothing about the pool's."""
    of_engine = [row for row in fleet.measurements if (row.engine or DEFAULT) == pool.engine]
    rows = [row for row in of_engine if row.chip == pool.chip.name and row.tp == tp]
    on_one_host = [row for row in of_engine if row.tp <= pool.per_host]
    fractions = calibrate.fitted(on_one_host, fleet.model, pool.chip, pool.dtype) or pool.fractions
    return Rates(fleet.model, pool.chip, tp, pool.dtype, fractions, rows, pool.pace)


def room_of(fleet: Fleet, pool: Inventory, tp: int) -> float:
    """Bytes for cache on the group's chips together."""
    return pool.chip.memory * tp * (pool.utilisation - _ACTIVATIONS) - fleet.model.weight_bytes


class Streams:
    """The trace's requests of some of the buckets, where there is a trace, to replay them."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._of: dict[tuple[bool, ...], Replayed] = {}

    def of(self, taken: tuple[bool, ...]) -> Replayed | None:
        if not self.fleet.replay:
            return None
        if taken not in self._of:
            bucket = bucket_of(self.fleet.workload.buckets)
            mine = [request for request in self.fleet.replay if taken[bucket(request)]]
            sizes = [float(max(request.prompt - request.cached, 1)) for request in mine]
            self._of[taken] = Replayed([request.at for request in mine], sizes, self.fleet.service.percentile)
        return self._of[taken]


@dataclass(frozen=True, slots=True)
class Place:
    """One pool with one size of group."""

    fleet: Fleet
    pool: Inventory
    index: int
    tp: int
    rates: Rates
    room: float
    replayed: Streams
    roles: tuple[Role, ...]

    @property
    def token_bytes(self) -> float:
        """Bytes of cache for a token on all chips of the group: heads that there are fewer of than chips are held by
        several, and MLA's vector by all."""
        model = self.fleet.model
        copies = self.tp if model.replicated else max(self.tp / model.kv_heads, 1.0)
        return model.kv_bytes(self.pool.dtype) * copies

    def candidates(self) -> Iterator[tuple[Candidate, Setup]]:
        if self.tp > self.pool.count:
            return
        makers = {"prefill": self._prefill, "decode": self._decode, "both": self._both}
        for role in self.roles:
            for label, taken in _parts(self.fleet.workload.buckets, decode=role == "decode"):
                if any(taken):
                    yield from makers[role](label, taken)

    def _prefill(self, label: str, taken: tuple[bool, ...]) -> Iterator[tuple[Candidate, Setup]]:
        service = self.fleet.service
        limit = service.ttft * (1 - service.margin)
        times = [self.rates.prefill(bucket.new, context=bucket.cached) for bucket in self.fleet.workload.buckets]
        fits = tuple(
            take and bucket.prompt * self.token_bytes <= self.room
            for take, bucket in zip(taken, self.fleet.workload.buckets, strict=True)
        )
        if not any(fits):
            return
        mean, scv = self._mix([time.seconds for time in times], fits)
        after = limit * ADMISSION + service.tpot
        for part in WAITS:
            wait = part * limit
            latency = tuple(wait + time.seconds + after for time in times)
            yield self._made(
                "prefill",
                f"{label}wait{part:g}",
                uses=(tuple(time.seconds for time in times),),
                latency=latency,
                serves=fits,
                shares=partial(self._queue, fits, wait, mean, scv),
                setup={
                    "service": tuple(t.seconds for t in times),
                    "wait": wait,
                    "mean": mean,
                    "scv": scv,
                    "rates": tuple(times),
                },
            )

    def _decode(self, label: str, taken: tuple[bool, ...]) -> Iterator[tuple[Candidate, Setup]]:
        service = self.fleet.service
        batch, step = self._batch(taken, service.tpot * (1 - service.margin))
        if batch < 1 or step is None:
            return
        buckets = self.fleet.workload.buckets
        busy = [bucket.output * step.seconds for bucket in buckets]
        mean, scv = self._mix(busy, taken)
        wait = service.ttft * (1 - service.margin) * ADMISSION
        yield self._made(
            "decode",
            label,
            uses=(tuple(t / batch for t in busy), self._memory(busy)),
            latency=(0.0,) * len(buckets),
            serves=self._fit(taken),
            shares=partial(self._slots, wait, batch, mean, scv),
            setup={"batch": batch, "step": step.seconds, "wait": wait, "mean": mean, "scv": scv, "rates": (step,)},
        )

    def _both(self, label: str, taken: tuple[bool, ...]) -> Iterator[tuple[Candidate, Setup]]:
        service, buckets = self.fleet.service, self.fleet.workload.buckets
        limit, tpot = service.ttft * (1 - service.margin), service.tpot * (1 - service.margin)
        times = [self.rates.prefill(bucket.new, context=bucket.cached) for bucket in buckets]
        for part in PARTS:
            batch, step = self._batch(taken, tpot * (1 - part))
            if batch < 1 or step is None:
                continue
            slowed = [time.seconds / part for time in times]
            busy = [bucket.output * tpot for bucket in buckets]
            mean, scv = self._mix(slowed, taken)
            slots = partial(self._slots, limit * ADMISSION, batch, *self._mix(busy, taken))
            for budget in WAITS:
                wait = budget * limit
                yield self._made(
                    "both",
                    f"{label}part{part:g}-wait{budget:g}",
                    uses=(tuple(slowed), tuple(t / batch for t in busy), self._memory(busy)),
                    latency=tuple(wait + time + limit * ADMISSION for time in slowed),
                    serves=self._fit(taken),
                    shares=partial(self._queue_and_slots, partial(self._queue, taken, wait, mean, scv), slots),
                    setup={
                        "batch": batch,
                        "step": step.seconds,
                        "service": tuple(time.seconds for time in times),
                        "part": part,
                        "wait": wait,
                        "mean": mean,
                        "scv": scv,
                        "rates": (*times, step),
                        "chunk": self._chunk(tpot * part),
                    },
                )

    def _queue(self, taken: tuple[bool, ...], wait: float, mean: float, scv: float, engines: int) -> tuple[float, ...]:
        """How busy prefill may be."""
        replayed = self.replayed.of(taken)
        if replayed is not None:
            return (replayed.usable(wait, engines, mean),)
        return (self._usable(wait, engines, mean, scv),)

    def _queue_and_slots(self, queue: Shares, slots: Shares, engines: int) -> tuple[float, ...]:
        return (*queue(engines), *slots(engines))

    def _slots(self, wait: float, batch: int, mean: float, scv: float, engines: int) -> tuple[float, ...]:
        """How many of a batch's places, and of the cache's memory, may be in use."""
        share = self._usable(wait, engines * batch, mean, scv)
        return share, share

    def _made(
        self,
        role: Role,
        label: str,
        *,
        uses: tuple[tuple[float, ...], ...],
        latency: tuple[float, ...],
        serves: tuple[bool, ...],
        shares: Shares,
        setup: dict[str, object],
    ) -> tuple[Candidate, Setup]:
        name = f"{self.pool.name}-{role}-tp{self.tp}-{label}".rstrip("-")
        most = self.pool.count // self.tp
        current = sum(n for kind, tp, n in self.pool.current if kind == role and tp == self.tp)
        candidate = Candidate(
            name=name,
            role=role,
            pool=self.index,
            group=self.tp,
            uses=uses,
            latency=latency,
            serves=serves,
            caps=tuple(Cap(count, found) for count, found in steps(shares, most)),
            current=current,
        )
        values: dict[str, object] = {"batch": 1, "chunk": 0, "service": (), "step": 0.0, "part": 1.0}
        values |= {"room": self.room, "token_bytes": self.token_bytes, "source": self.rates}
        return candidate, Setup(pool=self.pool.name, role=role, tp=self.tp, **(values | setup))  # type: ignore[arg-type]

    def _usable(self, wait: float, servers: int, mean: float, scv: float) -> float:
        load = self.fleet.workload
        return usable(wait, self.fleet.service.percentile, servers, mean, (load.burstiness + scv) / 2)

    def _mix(self, times: list[float], taken: tuple[bool, ...]) -> tuple[float, float]:
        """Mean and variation of the times of the requests that are taken."""
        shares = [
            bucket.share if take else 0.0 for take, bucket in zip(taken, self.fleet.workload.buckets, strict=True)
        ]
        return variation(times, shares)

    def _fit(self, taken: tuple[bool, ...]) -> tuple[bool, ...]:
        return tuple(
            take and (bucket.prompt + bucket.output) * self.token_bytes <= self.room
            for take, bucket in zip(taken, self.fleet.workload.buckets, strict=True)
        )

    def _memory(self, busy: list[float]) -> tuple[float, ...]:
        return tuple(
            time * (bucket.prompt + bucket.output / 2) * self.token_bytes / self.room
            for time, bucket in zip(busy, self.fleet.workload.buckets, strict=True)
        )

    def _batch(self, taken: tuple[bool, ...], limit: float) -> tuple[int, Rate | None]:
        """The most sequences whose step takes no longer than `limit` and whose cache fits, with that step."""
        buckets = [bucket for take, bucket in zip(self._fit(taken), self.fleet.workload.buckets, strict=True) if take]
        weight = sum(bucket.share * bucket.output for bucket in buckets)
        if not weight:
            return 0, None
        context = sum(b.share * b.output * (b.prompt + b.output / 2) for b in buckets) / weight
        low, high = 0, min(BATCHES, int(self.room // (context * self.token_bytes)))
        while low < high:
            middle = (low + high + 1) // 2
            if self.rates.decode(middle, context).seconds <= limit:
                low = middle
            else:
                high = middle - 1
        return low, self.rates.decode(low, context) if low else None

    def _chunk(self, seconds: float) -> int:
        """The largest piece of a prompt that takes no longer, in tokens, at least the 64 that keep a chip busy."""
        low, high = 64, 16384
        while low < high:
            middle = (low + high + 1) // 2
            if self.rates.prefill(middle).seconds <= seconds:
                low = middle
            else:
                high = middle - 1
        return low


def _parts(buckets: tuple[Bucket, ...], *, decode: bool) -> Iterator[tuple[str, tuple[bool, ...]]]:
    """All buckets, and the shorter and the longer ones of each two neighbours, by what the role has to do."""
    sizes = [bucket.prompt + bucket.output if decode else bucket.new for bucket in buckets]
    yield "", (True,) * len(buckets)
    for size in sorted(set(sizes))[:-1]:
        yield f"short{size:.0f}-", tuple(mine <= size for mine in sizes)
        yield f"long{size:.0f}-", tuple(mine > size for mine in sizes)
