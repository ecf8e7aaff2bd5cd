"""The shape of errors."""

from __future__ import annotations

import json

from deeplink.errors import DecodeFailed, InvalidRequest, Refused
from deeplink.router import openai


def test_a_refusal_carries_the_field_and_both_values() -> None:
    error = json.loads(openai.body(Refused("they differ", field="dtype", ours="a", theirs="b", remedy="fix it")))
    assert error == {
        "error": {
            "message": "they differ; field dtype: ours a, theirs b; fix it",
            "type": "server_error",
            "param": None,
            "code": "contract_refused",
            "field": "dtype",
            "ours": "a",
            "theirs": "b",
            "remedy": "fix it",
        }
    }


def test_a_clients_error_has_openais_type() -> None:
    assert json.loads(openai.body(InvalidRequest("no")))["error"]["type"] == "invalid_request_error"


def test_an_event_is_one_line_of_data() -> None:
    event = openai.event(DecodeFailed("line\nline"))
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
