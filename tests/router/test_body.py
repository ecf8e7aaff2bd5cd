"""The bodies the engines are sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.errors import InvalidRequest
from deeplink.router import body as bodies

TICKET = "dGlja2V0"
PART = {"deeplink": {"side": "consume", "ticket": TICKET}}
CONSUME = {bodies.PARAMS: PART}
PRODUCE = {bodies.PARAMS: bodies.params("produce", TICKET)}

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)
# Hypothesis knows the names in our sources, and tries them.
objects = st.dictionaries(st.text(), values).filter(lambda d: bodies.OURS.isdisjoint(d) and "vllm_xargs" not in d)
styles: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "ensure_ascii": st.booleans(),
        "indent": st.sampled_from([None, 0, 2]),
        "separators": st.sampled_from([None, (",", ":"), (" , ", " : ")]),
    }
)


def encode(value: object, style: dict[str, Any]) -> bytes:
    return json.dumps(value, **style).encode(errors="surrogatepass")


def text(value: object) -> bytes:
    return json.dumps(value).encode()


@settings(deadline=None)
@given(objects, styles, st.sampled_from([b"", b" ", b"\r\n\t "]))
def test_decode_is_the_clients_bytes_with_one_member_in_front(
    fields: dict[str, Any], style: dict[str, Any], space: bytes
) -> None:
    raw = space + encode(fields, style) + space
    body = bodies.parse(raw)
    assert body.raw is raw
    made = bodies.decode(body, CONSUME)
    assert json.loads(made) == fields | {"kv_transfer_params": PART}
    start = raw.index(b"{") + 1
    assert made.startswith(raw[:start] + b'"kv_transfer_params":')
    assert made.endswith(raw[start:])


@settings(deadline=None)
@given(
    objects, styles, st.lists(st.tuples(st.integers(0), st.sampled_from([b"", b'"', b"\\", b"{", b"1e999", b"\xff"])))
)
def test_a_body_is_read_as_the_library_that_explains_reads_it(
    fields: dict[str, Any], style: dict[str, Any], changes: list[tuple[int, bytes]]
) -> None:
    """Whole or broken: the one that is faster takes nothing that the other does not, and nothing as something else."""
    raw = encode(fields, style)
    for place, piece in changes:
        at = place % (len(raw) + 1)
        raw = raw[:at] + piece + raw[at + 1 :]
    try:
        wanted = json.loads(raw.decode())
    except ValueError:
        with pytest.raises(InvalidRequest):
            bodies.parse(raw)
        return
    if isinstance(wanted, dict) and bodies.OURS.isdisjoint(wanted):
        assert repr(bodies.parse(raw).fields) == repr(wanted)


@settings(deadline=None)
@given(objects, styles, values, st.integers(min_value=0))
def test_a_clients_own_params_never_get_through(
    fields: dict[str, Any], style: dict[str, Any], own: object, at: int
) -> None:
    items = list(fields.items())
    items.insert(at % (len(items) + 1), ("kv_transfer_params", own))
    body = bodies.parse(encode(dict(items), style))
    assert json.loads(body.raw) == fields
    assert json.loads(bodies.decode(body, CONSUME)) == fields | {"kv_transfer_params": PART}


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt":"x","kv_transfer_params":{"a":1}}',
        b'{"prompt":"x","kv_transfer_params":null}',
        b'{"kv_transfer_params":1,"prompt":"x","kv_transfer_params":2}',
        b'{"prompt":"x","kv\\u005ftransfer_params":{"a":1}}',
        b'{"\\u006b\\u0076_transfer_params":1,"prompt":"x","kv_transfer_params":2}',
    ],
)
def test_stripping_is_decided_on_the_parsed_body(raw: bytes) -> None:
    body = bodies.parse(raw)
    assert json.loads(body.raw) == {"prompt": "x"}
    assert json.loads(bodies.decode(body, CONSUME)) == {"prompt": "x", "kv_transfer_params": PART}
    prefill = json.loads(bodies.prefill(body, PRODUCE, chat=False))
    assert prefill["kv_transfer_params"] == bodies.params("produce", TICKET)


def test_a_member_that_only_looks_like_params_stays() -> None:
    raw = b'{"prompt":"\\"kv_transfer_params\\":1","metadata":{"kv_transfer_params":1}}'
    assert bodies.parse(raw).raw is raw


def test_params_hidden_in_vllm_xargs_are_removed() -> None:
    body = bodies.parse(text({"vllm_xargs": {"kv_transfer_params": {"a": 1}, "b": 2}}))
    assert json.loads(body.raw) == {"vllm_xargs": {"b": 2}}


def test_an_empty_object_stays_json() -> None:
    assert json.loads(bodies.decode(bodies.parse(b" { } "), CONSUME)) == {"kv_transfer_params": PART}


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"{} {}", b'{"a":\xff}'],
)
def test_what_is_not_a_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        bodies.parse(raw)


def test_nesting_too_deep_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        bodies.parse(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def test_a_refusal_quotes_nothing() -> None:
    with pytest.raises(InvalidRequest) as caught:
        bodies.parse(b'{"prompt": "my secret" oops}')
    assert "secret" not in str(caught.value)


def test_prefill_asks_for_one_token_and_no_stream() -> None:
    fields = {
        "model": "m",
        "prompt": "x",
        "max_tokens": 50,
        "min_tokens": 20,
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 1,
        "seed": 7,
        "unknown_field": {"a": [1]},
    }
    assert json.loads(bodies.prefill(bodies.parse(text(fields)), PRODUCE, chat=False)) == {
        "model": "m",
        "prompt": "x",
        "max_tokens": 1,
        "stream": False,
        "n": 1,
        "seed": 7,
        "unknown_field": {"a": [1]},
        "kv_transfer_params": {"deeplink": {"side": "produce", "ticket": TICKET}},
    }


@pytest.mark.parametrize(
    ("chat", "given_limits", "made"),
    [
        (True, {}, {"max_tokens": 1}),
        (True, {"max_tokens": 9}, {"max_tokens": 1}),
        (True, {"max_completion_tokens": 9}, {"max_completion_tokens": 1}),
        (True, {"max_completion_tokens": 9, "max_tokens": 9}, {"max_completion_tokens": 1, "max_tokens": 1}),
        (False, {}, {"max_tokens": 1}),
        (False, {"max_completion_tokens": 9}, {"max_completion_tokens": 1, "max_tokens": 1}),
    ],
)
def test_prefill_uses_the_limit_the_client_used(chat: bool, given_limits: dict[str, int], made: dict[str, int]) -> None:
    fields = json.loads(bodies.prefill(bodies.parse(text(given_limits)), PRODUCE, chat=chat))
    assert {name: value for name, value in fields.items() if name.startswith("max")} == made


def test_making_bodies_leaves_the_clients_alone() -> None:
    body = bodies.parse(text({"prompt": "x", "max_tokens": 9, "n": 1}))
    before = dict(body.fields)
    bodies.prefill(body, PRODUCE, chat=False)
    bodies.decode(body, CONSUME)
    assert body.fields == before


@pytest.mark.parametrize(
    ("fields", "obstacle"),
    [
        ({"prompt": "x"}, ""),
        ({"prompt": "x", "n": 1, "best_of": 1, "use_beam_search": False, "echo": False}, ""),
        ({"prompt": "x", "n": None, "prompt_logprobs": None}, ""),
        ({"prompt": [1, 2, 3]}, ""),
        ({"prompt": ["x"]}, ""),
        ({"prompt": [[1, 2]]}, ""),
        ({"prompt": "x", "echo": True}, ""),
        ({"prompt": "x", "logprobs": 3}, ""),
        ({"prompt": ["x", "y"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": "x", "n": 2}, "n"),
        ({"prompt": "x", "n": "2"}, "n"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "x", "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt": "x", "echo": True, "logprobs": 0}, "echo"),
        ({"prompt": "x", "echo": True, "max_tokens": 0}, "max_tokens"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ],
)
def test_what_cannot_be_handed_over(fields: dict[str, Any], obstacle: str) -> None:
    assert bodies.obstacle(bodies.parse(text(fields)), chat=False) == obstacle


def test_a_chats_prompt_field_is_not_a_prompt() -> None:
    assert bodies.obstacle(bodies.parse(text({"prompt": ["x", "y"]})), chat=True) == ""
