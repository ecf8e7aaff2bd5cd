"""The router's results as a picture, from the file that `router.py` has saved: every router of the run, side by side.

    python benchmarks/router_plot.py

Needs matplotlib. Nothing is measured. Bars are medians of the rounds; the goals are those of the table, which takes
each router's best round.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from rows import RESULTS

OURS, LEAST, OTHERS = "#2a7f62", "#9aa3ad", "#5b7fa6"
"""Also the bare proxy and nginx are there: not routers, but what is the least to be paid."""
NOT_ROUTERS = ("bare", "nginx")
Panel = tuple[str, Callable[[dict[str, Any]], float], str]


def panels(result: dict[str, Any]) -> list[Panel]:
    """Title, value of one router, and the row whose goal is drawn, if it has one."""
    direct = result["routers"]["direct"]
    return [
        ("CPU per plain request, ms", lambda one: float(one["cpu"]), "cpu_per_request"),
        ("CPU per request of 32 kB, ms", lambda one: float(one["cpu_large"]), ""),
        ("added latency p50, ms", lambda one: float(one["p50"]) - float(direct["p50"]), "added_latency_p50"),
        ("added latency p99, ms", lambda one: float(one["p99"]) - float(direct["p99"]), "added_latency_p99"),
        ("plain requests a second", lambda one: float(one["rate"]), ""),
        ("memory, MB", lambda one: float(one["rss"]), "rss_mb"),
    ]


def goal(result: dict[str, Any], name: str) -> float | None:
    """Where the goal of this row lies, in its own unit."""
    for row in result["rows"]:
        if row["name"] == name and row["goal"]:
            what, *_, number = row["goal"].split()
            return float(number) * (float(row["mark"]) if what == "ratio" else 1.0)
    return None


def draw(result: dict[str, Any], target: Path) -> None:
    """The same file from the same result."""
    rcParams["svg.hashsalt"] = "deeplink"
    routers = {name: one for name, one in result["routers"].items() if name != "direct"}
    colors = [OURS if name.startswith("deeplink") else LEAST if name in NOT_ROUTERS else OTHERS for name in routers]
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    FigureCanvasSVG(figure)
    for axes, (title, of, row) in zip(figure.subplots(2, 3).flat, panels(result), strict=True):
        values = [of(one) for one in routers.values()]
        places = range(len(values))
        axes.barh(places, values, color=colors, height=0.7)
        for place, value in zip(places, values, strict=True):
            axes.text(
                max(value, 0.0), place, f" {value:.3g}" if value < 1000 else f" {value:,.0f}", va="center", fontsize=7
            )
        if (line := goal(result, row)) is not None:
            axes.axvline(line, color="black", linewidth=1.2, linestyle="--")
        axes.set_yticks(places, list(routers), fontsize=8)
        axes.set_ylim(len(values) - 0.4, -0.6)
        axes.set_xlim(0, 1.25 * max(values))
        axes.set_title(title, fontsize=9)
        axes.tick_params(axis="x", labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    draw(json.loads((RESULTS / "router.json").read_text()), RESULTS / "router.svg")
