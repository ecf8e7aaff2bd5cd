"""The handoff and plain flows end to end."""

from __future__ import annotations

from .fake_engine import CHUNKS
from .rig import check, pair, rig


def test_handoff_calls_prefill_then_decode_with_one_ticket() -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with rig(producer, consumer) as router:
            got = await router.complete({"prompt": "x", "max_tokens": 9})
            assert got.status == 200, got.data
            assert got.headers["x-deeplink-path"] == "handoff"
            assert got.headers["x-deeplink-prefill"] == "p"
            assert got.headers["x-deeplink-decode"] == "d"
            assert got.headers["x-request-id"] == "r-1"
            (first,), (second,) = producer.calls, consumer.calls
            assert first.part["side"] == "produce"
            assert second.part["side"] == "consume"
            assert first.part["ticket"] == second.part["ticket"]
            assert first.ticket.handoff == got.headers["x-deeplink-handoff"]
            assert first.ticket.producer == producer.contract.epoch
            assert first.ticket.consumer == consumer.contract.epoch
            assert first.ticket.channel == "127.0.0.1:41"
            assert first.ticket.milliseconds == 120_000
            assert first.body["max_tokens"] == 1
            assert first.body["stream"] is False
            assert second.body["max_tokens"] == 9
            assert not producer.deleted
            assert not consumer.deleted

    check(test)


def test_stream_bytes_are_untouched() -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with rig(producer, consumer) as router:
            got = await router.complete({"prompt": "x", "stream": True})
            assert got.data == b"".join(CHUNKS)
            assert got.headers["content-type"] == "text/event-stream; charset=utf-8"

    check(test)
