"""The ledger: each id once, one final state, and a memory that ends."""

from __future__ import annotations

import pytest
from sockets import InThread

from deeplink.errors import Reason
from deeplink.kvconnector.handoffs import handoff as module
from deeplink.kvconnector.handoffs.handoff import FINAL, Ledger, Record


def test_a_life() -> None:
    ledger = Ledger()
    assert ledger.get("a") is None
    assert ledger.begin("a", "producer", "filling")
    assert ledger.get("a") == Record("a", "producer", "filling")
    ledger.enter("a", "staged")
    assert ledger.get("a") == Record("a", "producer", "staged")
    assert ledger.open == 1
    assert ledger.end("a", "drained", tokens=5, kv_bytes=10, digest=255)
    record = ledger.get("a")
    assert record is not None
    assert (record.state, record.tokens, record.kv_bytes, record.digest) == ("drained", 5, 10, "00000000000000ff")
    assert record.milliseconds >= 0
    assert ledger.open == 0
    assert ledger.ended_by_state == {"drained": 1}


def test_an_id_is_handled_once() -> None:
    ledger = Ledger()
    assert ledger.begin("a", "producer", "filling")
    assert not ledger.begin("a", "consumer", "receiving")
    ledger.end("a", "failed", Reason("x", "y"))
    assert not ledger.begin("a", "producer", "filling")
    assert ledger.get("a").state == "failed"  # type: ignore[union-attr]


def test_what_comes_late_changes_nothing() -> None:
    ledger = Ledger()
    ledger.enter("a", "staged")
    assert not ledger.end("a", "drained")
    assert ledger.get("a") is None
    ledger.begin("a", "consumer", "receiving")
    ledger.end("a", "loaded", digest=None)
    assert not ledger.end("a", "failed", Reason("x", "y"))
    ledger.enter("a", "receiving")
    record = ledger.get("a")
    assert record is not None
    assert (record.state, record.reason, record.digest) == ("loaded", None, "")
    assert ledger.ended_by_state == {"loaded": 1}


def test_the_oldest_are_forgotten_but_still_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 3)
    ledger = Ledger()
    ledger.begin("open", "producer", "filling")
    for index in range(5):
        ledger.begin(str(index), "producer", "filling")
        ledger.end(str(index), "drained")
    assert [ledger.get(str(index)) is not None for index in range(5)] == [False, False, True, True, True]
    assert ledger.get("open") is not None  # what is open is never forgotten
    assert ledger.ended_by_state == {"drained": 5}


def test_one_of_many_threads_ends_it() -> None:
    ledger = Ledger()
    for index in range(50):
        name = str(index)
        ledger.begin(name, "producer", "filling")
        ends = [InThread(lambda state=state, name=name: ledger.end(name, state)) for state in sorted(FINAL)]  # type: ignore[misc]
        assert [end.join() for end in ends].count(True) == 1
    assert sum(ledger.ended_by_state.values()) == 50
