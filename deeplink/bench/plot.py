"""The rows of a result as a picture: how far each is from its goal."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deeplink.errors import LocalError

MOST = 2.0
"""Where a bar is cut: a figure far above its goal would leave no room for the others."""
MET, MISSED, NO_GOAL = "#2a7f62", "#c8553d", "#9aa3ad"


@dataclass(frozen=True)
class Bar:
    """`length` is the ratio to the mark; `goal` where the goal is, if there is one."""

    name: str
    length: float
    goal: float | None
    at_least: bool
    color: str
    label: str


def bars(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    """From top to bottom."""
    return [_bar(row) for row in rows]


def _bar(row: dict[str, Any]) -> Bar:
    words = row["goal"].split()
    color = NO_GOAL if row["met"] is None else MET if row["met"] else MISSED
    label = f"{row['ratio']:.2f}   {row['value']:.3g} {row['unit']}"
    goal = float(words[-1]) if words and words[0] == "ratio" else None
    return Bar(row["name"], min(row["ratio"], MOST), goal, "least" in words, color, label)


def draw(result: dict[str, Any], target: Path) -> None:
    """Raises LocalError where matplotlib is not installed."""
    try:
        figures = importlib.import_module("matplotlib.figure")
        backend: Any = importlib.import_module("matplotlib.backends.backend_svg")
        settings = importlib.import_module("matplotlib").rcParams
    except ImportError as exc:
        raise LocalError("matplotlib is not installed", remedy="pip install 'deeplink[plots]'") from exc
    made = bars(result["rows"])
    settings["svg.hashsalt"] = "deeplink"  # the same rows make the same file
    figure = figures.Figure(figsize=(9, 1.2 + 0.3 * len(made)), layout="constrained")
    backend.FigureCanvasSVG(figure)
    axes = figure.subplots()
    places = range(len(made))
    axes.barh(places, [bar.length for bar in made], color=[bar.color for bar in made], height=0.7)
    for place, bar in zip(places, made, strict=True):
        axes.text(max(bar.length, bar.goal or 0.0) + 0.01, place, bar.label, va="center", fontsize=7)
        if bar.goal is not None:
            axes.plot([bar.goal] * 2, [place - 0.45, place + 0.45], color="black", linewidth=1.5)
    axes.set_yticks(places, [bar.name for bar in made], fontsize=8)
    axes.set_xlabel("ratio to the mark of the same run; the line is the goal (resume_resent: at most)")
    axes.set_xlim(0, max([1.3, *(bar.length + 0.3 for bar in made)]))
    axes.set_ylim(len(made) - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, metadata={"Date": None})
