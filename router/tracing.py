"""OpenTelemetry: one span a request, and one for each call to an engine, which is told it by W3C trace context.

Needs `pip install 'deeplink[tracing]'` and `router.tracing`; where spans go is said by OpenTelemetry's own variables
(`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_SERVICE_NAME`, …). Without it a client's trace context reaches the engines as it
came. Nothing of what was asked or answered is in a span.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from deeplink.errors import ConfigError
from deeplink.router.headers import Headers

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

CONTEXT = ("traceparent", "tracestate")
_QUIET: dict[str, Any] = {"record_exception": False, "set_status_on_exception": False}
"""Messages of errors may quote."""


class Trace(Protocol):
    """What a request's calls need of it."""

    @contextmanager
    def call(self, engine: str, work: str, headers: Headers) -> Iterator[Headers]:
        """A span while the context lasts; gives the headers with which the engine goes on with the trace."""

    def ended(self, status: str, words: dict[str, str]) -> None:
        """The request has ended so."""


class Spans:
    """Makes the spans of requests. `exporter` is for tests; by default the environment says where they go."""

    def __init__(self, exporter: Any = None) -> None:
        """Raises ConfigError without the libraries."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                processor: Any = BatchSpanProcessor(OTLPSpanExporter())
            else:
                processor = SimpleSpanProcessor(exporter)
        except ImportError as exc:
            raise ConfigError(
                "router.tracing is on, but OpenTelemetry is not installed",
                field="router.tracing",
                remedy="pip install 'deeplink[tracing]'",
            ) from exc
        # Its own, not the process's: several routers in one stay apart. What the environment says goes before ours.
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "deeplink-router"}).merge(Resource.create())
        )
        self._provider.add_span_processor(processor)
        self._tracer: Tracer = self._provider.get_tracer("deeplink")

    @contextmanager
    def request(self, method: str, path: str, headers: Headers) -> Iterator[RequestTrace]:
        """The span of one request, within the client's trace if it says one."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract({name.lower(): value for name, value in headers})
        with self._tracer.start_as_current_span(
            f"{method} {path}",
            context,
            SpanKind.SERVER,
            {"http.request.method": method, "url.path": path},
            **_QUIET,
        ) as span:
            yield RequestTrace(self._tracer, span)

    def close(self) -> None:
        """Sends what is left; may take some seconds."""
        self._provider.shutdown()


class RequestTrace:
    """One request's."""

    def __init__(self, tracer: Tracer, span: Any) -> None:
        self._tracer = tracer
        self._span = span

    @contextmanager
    def call(self, engine: str, work: str, headers: Headers) -> Iterator[Headers]:
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Named as its parent, since calls of one request may run in tasks of their own.
        parent = set_span_in_context(self._span)
        with self._tracer.start_as_current_span(
            f"{work} {engine}",
            parent,
            SpanKind.CLIENT,
            {"deeplink.engine": engine, "deeplink.work": work},
            **_QUIET,
        ) as span:
            told: dict[str, str] = {}
            TraceContextTextMapPropagator().inject(told, set_span_in_context(span))
            yield [pair for pair in headers if pair[0].lower() not in CONTEXT] + list(told.items())

    def ended(self, status: str, words: dict[str, str]) -> None:
        from opentelemetry.trace import StatusCode

        for name, value in words.items():
            if value:
                self._span.set_attribute(f"deeplink.{name}", value)
        if status.isdigit():
            self._span.set_attribute("http.response.status_code", int(status))
            if status >= "500":
                self._span.set_status(StatusCode.ERROR)
