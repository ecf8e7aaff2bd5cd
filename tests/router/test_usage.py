"""Which prompt tokens were cached, in the answer of a handoff."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deeplink.router import usage

from .fake_engine import CHUNKS, answers, completion, streams
from .rig import check, pair, rig

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def told(cached: int | None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    return {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, "prompt_tokens_details": details}


def test_it_is_read_from_prefills_answer() -> None:
    assert usage.details(json.dumps({"usage": told(3)}).encode()) == {"cached_tokens": 3}
    for answer in (b"", b"{", b"[]", b'{"usage": 1}', json.dumps({"usage": told(None)}).encode()):
        assert usage.details(answer) is None
    assert usage.details(b'{"usage": {"prompt_tokens_details": 1}}') is None


@given(st.dictionaries(st.text(), values), st.integers(0, 9), st.none() | st.integers(0, 9))
def test_nothing_else_changes(rest: dict[str, Any], theirs: int, ours: int | None) -> None:
    details = None if ours is None else {"cached_tokens": ours}
    answer = json.dumps(rest | {"usage": told(theirs)}).encode()
    merged = usage.merged(answer, details)
    assert json.loads(merged) == rest | {"usage": told(ours)}
    if theirs == ours:
        assert merged == answer


@given(st.binary())
def test_what_has_no_usage_keeps_its_bytes(data: bytes) -> None:
    assert usage.merged(data, {"cached_tokens": 1}) == data
    assert usage.merged_events(data, {"cached_tokens": 1}) == data


def test_only_the_event_with_the_usage_changes() -> None:
    last = b"data: " + json.dumps({"choices": [], "usage": told(8)}, separators=(",", ":")).encode() + b"\n\n"
    wanted = b"data: " + json.dumps({"choices": [], "usage": told(3)}, separators=(",", ":")).encode() + b"\n\n"
    for end in (b"\n", b"\r\n"):
        whole = (CHUNKS[0] + last + CHUNKS[-1]).replace(b"\n", end)
        assert usage.merged_events(whole, {"cached_tokens": 3}) == (CHUNKS[0] + wanted + CHUNKS[-1]).replace(b"\n", end)


def test_a_handoffs_answer_says_what_prefill_had_cached() -> None:
    async def test() -> None:
        producer, consumer = pair()
        producer.answer = answers(200, json.dumps(completion() | {"usage": told(3)}).encode())
        consumer.answer = answers(200, json.dumps(completion() | {"usage": told(8)}).encode())
        async with rig(producer, consumer) as route:
            ask = {"prompt": "x"}
            assert json.loads((await route.complete(ask)).data)["usage"] == told(3)
            # A plain request is the engine's own business.
            assert json.loads((await route.complete(ask | {"n": 2})).data)["usage"] == told(8)
            last = b"data: " + json.dumps({"choices": [], "usage": told(8)}).encode() + b"\n\n"
            consumer.answer = streams(CHUNKS[0], last, CHUNKS[-1])
            got = await route.complete(ask | {"stream": True})
            assert json.loads(got.data.split(b"data: ")[2])["usage"] == told(3)
            assert got.data.startswith(CHUNKS[0])
            assert got.data.endswith(CHUNKS[-1])

    check(test)
