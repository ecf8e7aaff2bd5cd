"""Keeping requests away from an engine that fails them."""

from __future__ import annotations

from deeplink.router.breaker import MAX_SECONDS, Breaker


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(3, 2.0)
    for _ in range(4):
        breaker.failed(0.0)
        breaker.failed(0.0)
        breaker.succeeded()
    assert not breaker.shut(0.0)
    for _ in range(3):
        breaker.failed(10.0)
    assert "3 requests in a row failed" in breaker.shut(10.0)
    assert breaker.shut(11.9)
    assert not breaker.shut(12.0)


def test_one_request_tries_whether_it_is_well_again() -> None:
    breaker = Breaker(1, 2.0)
    assert not breaker.begin()
    breaker.failed(0.0)
    assert not breaker.shut(2.0)
    assert breaker.begin()
    assert "being tried" in breaker.shut(2.0)
    assert not breaker.begin()
    breaker.succeeded()
    assert not breaker.shut(2.0)


def test_it_waits_longer_each_time_up_to_a_limit() -> None:
    breaker, now = Breaker(1, 2.0), 0.0
    pauses = []
    for _ in range(8):
        breaker.failed(now)
        pauses.append(breaker.pause)
        now = breaker.until
        breaker.begin()
    assert pauses[:3] == [2.0, 4.0, 8.0]
    assert pauses[-1] == MAX_SECONDS


def test_failures_of_requests_from_before_do_not_count_twice() -> None:
    breaker = Breaker(1, 2.0)
    for _ in range(9):
        breaker.failed(1.0)
    assert breaker.until == 3.0


def test_a_try_that_tells_nothing_leaves_room_for_another() -> None:
    breaker = Breaker(1, 2.0)
    breaker.failed(0.0)
    assert breaker.begin()
    breaker.ended()
    assert not breaker.shut(2.0)
