"""LMDeploy's own scheduler, loop and sessions with deeplink in them, and no model: the test orders the events."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def told(in_lmdeploy: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(in_lmdeploy("loop.py").splitlines()[-1])
    return found


def test_a_cache_is_handed_over_with_its_first_token(told: dict[str, Any]) -> None:
    assert (told["handed"], told["token"]) == (True, [7])


def test_nothing_lands_before_the_forwards_that_were_sent_are_over(told: dict[str, Any]) -> None:
    """One of them may have the request in it whose blocks these were."""
    assert (told["early"], told["late"]) == (False, True)


def test_who_leaves_while_it_waits_loads_nothing(told: dict[str, Any]) -> None:
    """Its blocks may be another's by the time it would begin."""
    assert told["left"] is False


def test_a_ticket_brings_the_first_token_which_may_be_the_last(told: dict[str, Any]) -> None:
    assert told["tickets"] == [[[7], "SUCCESS"], [[7], "FINISH"]]


def test_a_ticket_that_nobody_minted(told: dict[str, Any]) -> None:
    assert told["forged"]


def test_nothing_is_held_after(told: dict[str, Any]) -> None:
    first, last = told["held"]
    assert first == last


def test_with_other_weights_nothing_is_handed_over(told: dict[str, Any]) -> None:
    assert told["closed"] == [True, True]
