"""What the router counts, in Prometheus' text format. Names of engines are labels, nothing of a request is."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from deeplink.router.admission import Admission
from deeplink.router.chooser import Ending
from deeplink.router.fleet import Fleet

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics(Collector):
    """Counted in a registry of its own, so that several routers in one process stay apart."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, fleet: Fleet, admission: Admission) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Now(fleet, admission))
        self._registry.register(self)
        self._requests: Counter[tuple[str, str]] = Counter()
        self._errors: Counter[str] = Counter()
        self._handoffs: Counter[tuple[str, str, str]] = Counter()
        self._tries = 0
        self._first: defaultdict[str, _Times] = defaultdict(_Times)
        self._whole: defaultdict[str, _Times] = defaultdict(_Times)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def first_byte(self, exchange: Ending, seconds: float) -> None:
        self._first[exchange.kind].observe(seconds)

    def ended(self, exchange: Ending, status: str, code: str, seconds: float) -> None:
        """A request has ended. `status` is that of its answer, or gone; `code` the typed error's, if it had one."""
        kind = exchange.kind
        self._requests[kind, status] += 1
        self._whole[kind].observe(seconds)
        if code:
            self._errors[code] += 1
        self._tries += exchange.tried
        for prefill, decode, finished in exchange.ends:
            self._handoffs[prefill, decode, "done" if finished else "cancelled"] += 1

    def refused(self, status: str, code: str) -> None:
        """A request was not served at all: no key, no JSON, too large."""
        self._requests["none", status] += 1
        self._errors[code] += 1

    def collect(self) -> Iterator[Metric]:
        """All of the above, for the registry."""
        requests = CounterMetricFamily("deeplink_requests", "Requests that have ended.", labels=("path", "status"))
        for labels, count in self._requests.items():
            requests.add_metric(labels, count)
        errors = CounterMetricFamily("deeplink_errors", "Typed errors told to clients.", labels=("code",))
        for code, count in self._errors.items():
            errors.add_metric((code,), count)
        handoffs = CounterMetricFamily(
            "deeplink_handoffs", "Handoffs by their end.", labels=("prefill", "decode", "end")
        )
        for ends, count in self._handoffs.items():
            handoffs.add_metric(ends, count)
        yield from (requests, errors, handoffs)
        yield CounterMetricFamily("deeplink_retries", "Tries beyond a request's first.", value=self._tries)
        for name, what, times in (
            ("deeplink_first_byte_seconds", "the first byte of its answer", self._first),
            ("deeplink_request_seconds", "the end of its answer", self._whole),
        ):
            family = HistogramMetricFamily(name, f"From a request's arrival to {what}.", labels=("path",))
            for path, one in times.items():
                family.add_metric((path,), one.buckets(), one.sum)
            yield family


class _Times:
    """A histogram. The library's own take locks, and several times as long; here is one thread."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(_SECONDS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(_SECONDS, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, float]]:
        bounds = [*map(floatToGoString, _SECONDS), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


class _Now(Collector):
    """What is so at the moment of asking."""

    def __init__(self, fleet: Fleet, admission: Admission) -> None:
        self._fleet = fleet
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        load = self._admission.load
        shut = self._admission.shut()
        up = GaugeMetricFamily("deeplink_engine_up", "Whether the engine answers.", labels=("engine", "role"))
        taking = GaugeMetricFamily(
            "deeplink_engine_takes_requests", "Whether the engine gets new requests.", labels=("engine",)
        )
        use = GaugeMetricFamily("deeplink_engine_kv_use", "Part of its KV memory in use.", labels=("engine",))
        requests = GaugeMetricFamily("deeplink_engine_requests", "Requests at the engine.", labels=("engine",))
        tokens = GaugeMetricFamily(
            "deeplink_engine_tokens", "Estimated tokens of requests at the engine.", labels=("engine", "work")
        )
        for engine in self._fleet.table.engines:
            name = engine.name
            up.add_metric((name, engine.role), float(not engine.down))
            taking.add_metric((name,), float(not engine.down and name not in shut))
            use.add_metric((name,), self._fleet.use(name))
            given = load.of(name)
            requests.add_metric((name,), given.requests)
            tokens.add_metric((name, "prefill"), given.prefill)
            tokens.add_metric((name, "decode"), given.decode)
        yield from (up, taking, use, requests, tokens)
        index = self._admission.index
        exact = GaugeMetricFamily(
            "deeplink_engine_cache_exact", "Whether what it holds is known from its own events.", labels=("engine",)
        )
        for name in index.names:
            exact.add_metric((name,), float(not index.why(name)))
        yield exact
        yield CounterMetricFamily(
            "deeplink_prefix_guesses",
            "Requests whose tokens were not known in time, so that what engines hold was guessed.",
            value=self._admission.guessed,
        )
        yield GaugeMetricFamily(
            "deeplink_queue", "Requests that wait because all engines are full.", value=len(self._admission.queue)
        )
