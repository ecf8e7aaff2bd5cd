"""What is drawn of a result."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deeplink.bench import plot
from deeplink.bench.rows import Row
from deeplink.errors import LocalError

ROWS = [
    Row("met", 9.0, "GB/s", "m", 10.0, 0.9, "at least").as_json(),
    Row("missed", 2.0, "GB/s", "m", 10.0, 0.1, "at most").as_json(),
    Row("far", 50.0, "GB/s", "m", 10.0).as_json(),
    Row("value", 5.0, "ms", "m", 10.0, 6, "at most", of="value").as_json(),
]


def test_bars() -> None:
    met, missed, far, value = plot.bars(ROWS)
    assert met == plot.Bar("met", 0.9, 0.9, True, plot.MET, "0.90   9 GB/s")
    assert (missed.length, missed.goal, missed.at_least, missed.color) == (0.2, 0.1, False, plot.MISSED)
    assert (far.length, far.goal, far.color) == (plot.MOST, None, plot.NO_GOAL)
    assert far.label.startswith("5.00 ")
    assert (value.goal, value.color) == (None, plot.MET)  # its goal is not on the axis


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LocalError, match=r"matplotlib.*deeplink\[plots\]"):
        plot.draw({"rows": ROWS}, tmp_path / "a.svg")


@pytest.mark.filterwarnings("default")
def test_the_same_rows_make_the_same_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        plot.draw({"rows": ROWS}, tmp_path / name)
    first, second = ((tmp_path / name).read_text() for name in ("a.svg", "b.svg"))
    assert first == second
    assert "<svg" in first
