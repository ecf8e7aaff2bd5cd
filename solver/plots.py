"""A placement, and a Pareto front, as pictures. Needs the extra `plots`; everything else works without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deeplink.errors import SolverError
from deeplink.solver.placement import Placement, Point


def draw(placement: Placement, folder: Path) -> list[Path]:
    """Writes busy.svg, times.svg and limits.svg, each where there is something to show, and answers their paths."""
    written = []
    if placement.engines:
        names = [f"{engine.count} x {engine.name}" for engine in placement.engines]
        values = [100 * engine.busy for engine in placement.engines]
        written.append(_bars(folder / "busy.svg", names, values, "per cent of what an engine can do"))
    if placement.predicted is not None:
        written.append(_times(folder / "times.svg", placement))
    if placement.bindings:
        names = [f"{binding.kind} {binding.name}" for binding in placement.bindings]
        values = [binding.shadow_price for binding in placement.bindings]
        title = f"{placement.objective} ({placement.unit}) for one more of it"
        written.append(_bars(folder / "limits.svg", names, values, title))
    return written


def front(points: Sequence[Point], path: Path) -> Path:
    """The cost an hour over the rate, as SVG."""
    figure, axes = _figure()
    axes.plot([point.rate for point in points], [point.cost for point in points], marker="o")
    axes.set_xlabel("requests a second")
    axes.set_ylabel("cost an hour")
    return _write(figure, path)


def _times(path: Path, placement: Placement) -> Path:
    predicted, simulated = placement.predicted, placement.simulated
    assert predicted is not None
    figure, axes = _figure()
    for row, name in enumerate(("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")):
        range_ = getattr(predicted, name)
        axes.plot([range_.low, range_.high], [row, row], color="tab:blue", label="predicted" if row == 0 else None)
        axes.plot([range_.value], [row], "o", color="tab:blue")
        if simulated is not None:
            label = "simulated" if row == 0 else None
            axes.plot([getattr(simulated, name)], [row], "x", color="tab:red", label=label)
    axes.set_yticks(range(4), ["first token, p50", "first token, p99", "further token, p50", "further token, p99"])
    axes.set_xscale("log")
    axes.set_xlabel("seconds")
    axes.legend()
    return _write(figure, path)


def _bars(path: Path, names: Sequence[str], values: Sequence[float], title: str) -> Path:
    figure, axes = _figure()
    axes.barh(range(len(names)), values)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(title)
    return _write(figure, path)


def _figure() -> tuple[Any, Any]:
    try:
        import matplotlib
    except ImportError as exc:
        raise SolverError("plots need matplotlib", remedy="pip install 'deeplink[plots]'") from exc
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "deeplink"  # without it the same picture has other bytes every time
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    return figure, figure.add_subplot()


def _write(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
    return path
