"""How a worker's results reach a scheduler that tells failed loads by their blocks."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from vllm_deeplink.versions import TESTED, v0_27, v0_29, v0_32


class Settled:
    sent: ClassVar[set[str]] = {"a"}
    received: ClassVar[set[str]] = {"b", "c", "d"}
    failed: ClassVar[dict[str, int]] = {"c": 7, "d": 9}


class Worker:
    """Its results, and in which order it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.settled = Settled()

    def results(self, finished: set[str]) -> Any:
        self.asked.append("results")
        return self.settled


class Connector(v0_29.Reports):
    def __init__(self) -> None:
        self._worker = Worker()  # type: ignore[assignment]

    def wait_for_save(self) -> None:
        self._worker.asked.append("save")  # type: ignore[union-attr,attr-defined]


def test_by_blocks() -> None:
    connector = Connector()
    assert connector.get_block_ids_with_load_errors() == set()
    assert connector.get_finished({"a"}) == ({"a"}, {"b", "c", "d"})
    assert connector.get_block_ids_with_load_errors() == {7, 9}


def test_a_step_without_a_forward_pass_is_saved_too() -> None:
    connector = Connector()
    connector.get_finished(set())
    assert connector._worker.asked == ["save", "results"]  # type: ignore[union-attr,attr-defined]


def test_what_failed_is_told_once() -> None:
    connector = Connector()
    connector.get_finished(set())
    connector._worker.settled.failed = {}  # type: ignore[union-attr,attr-defined,misc]
    connector.get_finished(set())
    assert connector.get_block_ids_with_load_errors() == set()


class Layer:
    """An attention layer of a version that tells the layer, or of one whose implementation knows."""

    def __init__(self, **names: str) -> None:
        self.impl = self
        self.__dict__.update(names)


@pytest.mark.parametrize("version", TESTED, ids=lambda version: version.name)
def test_packing(version: Any) -> None:
    assert version.packing(Layer(isa="amx")) == "amx"
    assert version.packing(Layer()) == ""


def test_what_a_version_shares_it_takes_from_another() -> None:
    assert v0_27.VERSION.reports is v0_29.VERSION.reports
    assert v0_29.VERSION.packing is v0_32.VERSION.packing
