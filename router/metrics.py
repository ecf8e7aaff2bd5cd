"""What the router counts, in Prometheus' text format. Names of engines are labels, nothing of a request is."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from deeplink.router.admission import Admission
from deeplink.router.exchange import Exchange
from deeplink.router.fleet import Fleet

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counted in a registry of its own, so that several routers in one process stay apart."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, fleet: Fleet, admission: Admission) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Now(fleet, admission))
        registry = self._registry
        self._requests = Counter(
            "deeplink_requests", "Requests that have ended.", ("path", "status"), registry=registry
        )
        self._errors = Counter("deeplink_errors", "Typed errors told to clients.", ("code",), registry=registry)
        self._handoffs = Counter(
            "deeplink_handoffs", "Handoffs by their end.", ("prefill", "decode", "end"), registry=registry
        )
        self._tries = Counter("deeplink_retries", "Tries beyond a request's first.", registry=registry)
        self._first = Histogram(
            "deeplink_first_byte_seconds",
            "From a request's arrival to the first byte of its answer.",
            ("path",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._whole = Histogram(
            "deeplink_request_seconds",
            "From a request's arrival to the end of its answer.",
            ("path",),
            buckets=_SECONDS,
            registry=registry,
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def first_byte(self, exchange: Exchange, seconds: float) -> None:
        self._first.labels(exchange.kind).observe(seconds)

    def ended(self, exchange: Exchange, status: str, code: str, seconds: float) -> None:
        """A request has ended. `status` is that of its answer, or gone; `code` the typed error's, if it had one."""
        self._requests.labels(exchange.kind, status).inc()
        self._whole.labels(exchange.kind).observe(seconds)
        if code:
            self._errors.labels(code).inc()
        if exchange.tried:
            self._tries.inc(exchange.tried)
        for prefill, decode, finished in exchange.ends:
            self._handoffs.labels(prefill, decode, "done" if finished else "cancelled").inc()

    def refused(self, status: str, code: str) -> None:
        """A request was not served at all: no key, no JSON, too large."""
        self._requests.labels("none", status).inc()
        self._errors.labels(code).inc()


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
            requests.add_metric((name,), load.requests[name])
            tokens.add_metric((name, "prefill"), load.prefill[name])
            tokens.add_metric((name, "decode"), load.decode[name])
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
