"""Two real LMDeploy engines of unlike block sizes: prefill in one, decode in the other, on the cache handed over."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from matrix import Matrix

from deeplink.kvconnector.contracts import contract

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def told(in_lmdeploy: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("migration")
    for name, seed in (("model", "0"), ("other", "1")):
        in_lmdeploy("make_models.py", folder / name, seed)
    config: Path = folder / "deeplink.toml"
    config.write_text("[kv]\nforeign_seconds = 30\n")
    printed = in_lmdeploy("migrate.py", folder / "model", folder / "other", config)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def test_tokens_are_those_of_the_decode_engine_alone(told: dict[str, Any], request: pytest.FixtureRequest) -> None:
    assert len(told["alone"]) == 7
    for length, alone, migrated in told["alone"]:
        assert migrated == alone, length
    # Prompts are answered differently, or a wrong cache would not be seen.
    assert len({tuple(alone) for _, alone, _ in told["alone"]}) == 7
    found = Matrix()
    found.record(*(contract.decode(base64.b64decode(text)) for text in told["contracts"]), "exact")
    found.write({request.node.nodeid})


def test_requests_at_once_some_of_which_leave(told: dict[str, Any]) -> None:
    load = told["load"]
    assert load["wrong"] == load["failed"] == 0
    assert load["right"] + load["left"] == 40
    assert load["left"] > 0


def test_a_ticket_brings_the_first_token_which_may_be_the_last(told: dict[str, Any]) -> None:
    assert [len(found) for _, found in told["tickets"]] == [16, 1]
    for alone, found in told["tickets"]:
        assert found == alone


def test_a_ticket_that_nobody_minted_is_refused(told: dict[str, Any]) -> None:
    assert told["forged"] == "INTERNAL_ENGINE_ERROR"


def test_a_forward_that_was_sent_before_does_not_write_over_what_has_landed(told: dict[str, Any]) -> None:
    """LMDeploy sends a forward before it knows who has left; whose blocks may be another's by the time it runs."""
    alone, migrated = told["overtaken"]
    assert migrated == alone


def test_nothing_is_held_after(told: dict[str, Any]) -> None:
    assert told["sessions"] == [0, 0]
    assert all(first == last for first, last in told["blocks"])


def test_one_bad_request_fails_alone(told: dict[str, Any]) -> None:
    assert told["bad"] == ["INTERNAL_ENGINE_ERROR", "FINISH"]


def test_a_prompt_that_lmdeploy_would_not_get_to_the_end_of_is_refused(told: dict[str, Any]) -> None:
    assert told["long"] == "INPUT_LENGTH_ERROR"


def test_other_weights_are_refused_by_name(told: dict[str, Any]) -> None:
    assert told["refused"] == "model.weights"
