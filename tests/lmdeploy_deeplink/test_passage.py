"""How a ticket comes from a request's body to LMDeploy's engine."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmdeploy_deeplink.migration import passage

TICKET = "abc_DEF-123=="
BODY = {"prompt": "x", "kv_transfer_params": {"deeplink": {"side": "consume", "ticket": TICKET}}}


def test_a_ticket_is_moved_to_where_lmdeploy_carries_it() -> None:
    changed = passage.rewrite(json.dumps({**BODY, "with_cache": True, "migration_request": {"a": 1}}).encode())
    assert changed is not None
    fields = json.loads(changed)
    assert fields.keys() == {"prompt", "migration_request"}
    asked = fields["migration_request"]
    assert asked.keys() == {
        *("protocol", "remote_engine_id", "remote_session_id", "remote_token_id", "remote_block_ids"),
    }
    assert passage.read(SimpleNamespace(**asked)) == ("consume", TICKET)


@pytest.mark.parametrize("name", ["", "http://127.0.0.1:1", "deeplink"])
def test_an_engine_of_another_router_is_no_ticket(name: str) -> None:
    assert passage.read(SimpleNamespace(remote_engine_id=name)) is None
    assert passage.read(None) is None


@given(st.text(), st.text())
def test_no_text_is_taken_for_another(side: str, text: str) -> None:
    """Whatever a client has put there: it is looked at as a ticket, which it is not."""
    found = passage.read(SimpleNamespace(remote_engine_id=f"{passage.PREFIX}{side}-{text}"))
    assert found is not None
    assert "-".join(found) == f"{side}-{text}"


@given(st.binary(max_size=64) | st.binary(max_size=32).map(lambda junk: b'{"kv_transfer_params":' + junk))
def test_what_is_no_body_with_a_ticket_passes_as_it_is(body: bytes) -> None:
    assert passage.rewrite(body) is None
