"""Spans of a request and of its calls, and what engines are told of the trace."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deeplink.router import tracing
from deeplink.router.parts import SPANS

from .fake_engine import answers
from .rig import check, pair, rig

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Any:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    made = tracing.Spans(exporter)
    monkeypatch.setattr("deeplink.router.app.Spans", lambda: made)
    return exporter


def test_a_request_and_its_calls_are_one_trace(spans: Any) -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with rig(producer, consumer, tracing=True) as route:
            headers = {"traceparent": PARENT, "tracestate": "vendor=1"}
            assert (await route.complete({"prompt": "a secret"}, headers=headers)).status == 200
            await asyncio.sleep(0.05)
            found = {span.name: span for span in spans.get_finished_spans()}
            assert set(found) == {"POST /v1/completions", "prefilling p", "decoding d"}
            whole = found["POST /v1/completions"]
            assert f"{whole.context.trace_id:032x}" == PARENT[3:35]
            assert f"{whole.parent.span_id:016x}" == PARENT[36:52]
            assert whole.attributes["http.response.status_code"] == 200
            assert whole.attributes["deeplink.prefill"] == "p"
            for name, engine in (("prefilling p", producer), ("decoding d", consumer)):
                span = found[name]
                assert span.parent.span_id == whole.context.span_id
                told = engine.calls[0].headers.getall("traceparent")
                assert told == [f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"]
                assert engine.calls[0].headers.getall("tracestate") == ["vendor=1"]
            assert "secret" not in str([span.to_json() for span in found.values()])

    check(test)


def test_a_failure_is_in_the_span_and_its_words_are_not(spans: Any) -> None:
    async def test() -> None:
        producer, consumer = pair()
        consumer.answer = answers(500, {"error": {"message": "a secret was asked"}})
        async with rig(producer, consumer, tracing=True, retries=0) as route:
            assert (await route.complete({"prompt": "x"})).status == 502
            await asyncio.sleep(0.05)
            whole = next(span for span in spans.get_finished_spans() if span.name.startswith("POST"))
            assert whole.attributes["deeplink.code"] == "decode_failed"
            assert not whole.status.is_ok
            assert "secret" not in str([span.to_json() for span in spans.get_finished_spans()])

    check(test)


def test_without_tracing_a_clients_context_passes_as_it_is() -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with rig(producer, consumer) as route:
            assert SPANS not in route.app
            assert (await route.complete({"prompt": "x"}, headers={"traceparent": PARENT})).status == 200
            assert [call.headers["traceparent"] for call in producer.calls + consumer.calls] == [PARENT] * 2

    check(test)
