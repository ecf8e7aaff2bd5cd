"""How a ticket comes from a request's body to SGLang's scheduler."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.errors import TicketRefused
from sglang_deeplink import passage

TICKET = "abc_DEF-123=="
BODY = {"prompt": "x", "kv_transfer_params": {"deeplink": {"side": "consume", "ticket": TICKET}}}


def test_a_ticket_is_moved_to_where_sglang_carries_it() -> None:
    body = {**BODY, "bootstrap_host": "elsewhere", "bootstrap_port": 1}
    changed = passage.rewrite(json.dumps(body).encode())
    assert changed is not None
    fields = json.loads(changed)
    assert "kv_transfer_params" not in fields
    assert fields["prompt"] == "x"
    assert fields["bootstrap_port"] is None
    assert passage.read(fields["bootstrap_host"], "consume") == TICKET
    with pytest.raises(TicketRefused):
        passage.read(fields["bootstrap_host"], "produce")


@pytest.mark.parametrize("host", [None, "", "127.0.0.1", "deeplink.example"])
def test_a_host_is_no_ticket(host: str | None) -> None:
    assert passage.read(host, "consume") is None


@given(st.binary(max_size=64) | st.binary(max_size=32).map(lambda junk: b'{"kv_transfer_params":' + junk))
def test_what_is_no_body_with_a_ticket_passes_as_it_is(body: bytes) -> None:
    assert passage.rewrite(body) is None


@pytest.mark.parametrize(
    "given", [None, 1, [], {}, {"deeplink": 1}, {"deeplink": {"side": 1, "ticket": "x"}}, {"deeplink": {"side": "x"}}]
)
def test_nor_does_one_that_is_malformed(given: object) -> None:
    assert passage.rewrite(json.dumps({"kv_transfer_params": given}).encode()) is None


def test_rooms_tell_handoffs_apart_and_are_never_none() -> None:
    rooms = {passage.room(f"{index:024x}") for index in range(1000)}
    assert len(rooms) == 1000
    assert all(0 < room < 1 << 60 for room in rooms)
