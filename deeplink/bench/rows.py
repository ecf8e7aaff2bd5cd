"""The form of every benchmark's result: one row per figure, each beside its mark from the same run."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Row:
    """`ratio` is value over mark. `goal` bounds it from above or below, or `value` itself when `of` says so.

    `cpu_s_per_gb` is what the value cost: seconds of all cores and processes for 10^9 bytes, `mark_cpu_s_per_gb` what
    the mark cost. It is steadier than the value on a machine that does other things too. `breakdown` says where the
    time went, in seconds by part.
    """

    name: str
    value: float
    unit: str
    mark_name: str
    mark: float
    goal: float | None = None
    sense: Literal["at most", "at least"] = "at most"
    of: Literal["ratio", "value"] = "ratio"
    cpu_s_per_gb: float | None = None
    mark_cpu_s_per_gb: float | None = None
    breakdown: Mapping[str, float] | None = None
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.value / self.mark if self.mark else float("inf")

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        figure = self.ratio if self.of == "ratio" else self.value
        return figure <= self.goal if self.sense == "at most" else figure >= self.goal

    def as_json(self) -> dict[str, Any]:
        goal = "" if self.goal is None else f"{self.of} {self.sense} {self.goal:g}"
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "unit": self.unit,
            "mark_name": self.mark_name,
            "mark": round(self.mark, 4),
            "ratio": round(self.ratio, 4),
            "goal": goal,
            "met": self.met,
            **_given(cpu_s_per_gb=self.cpu_s_per_gb, mark_cpu_s_per_gb=self.mark_cpu_s_per_gb),
            **({} if self.breakdown is None else {"breakdown": _rounded(self.breakdown)}),
            **({"note": self.note} if self.note else {}),
        }


def _given(**figures: float | None) -> dict[str, float]:
    return {name: round(figure, 4) for name, figure in figures.items() if figure is not None}


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {part: round(value, 4) for part, value in seconds.items()}


@dataclass(frozen=True)
class Skipped:
    """A row that could not be measured here, and why."""

    name: str
    reason: str

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "reason": self.reason}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, with a column for the cost where one of them has it."""
    costed = any("cpu_s_per_gb" in row for row in rows)
    head = ["figure", "value", "mark", "ratio", "goal", "met", *(["CPU s/GB"] if costed else [])]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        cost = row.get("cpu_s_per_gb")
        lines.append(
            [
                f"`{row['name']}`",
                f"{_number(row['value'])} {row['unit']}",
                f"{_number(row['mark'])} ({row['mark_name']})",
                f"{row['ratio']:.2f}",
                row["goal"],
                "" if row["met"] is None else "yes" if row["met"] else "no",
                *(["" if cost is None else f"{cost:.2f}"] if costed else []),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.2g}"


def write_table(page: Path, name: str, result: Mapping[str, Any]) -> None:
    """Put the rows into a Markdown file, between the markers of this benchmark."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} has no lines {begin} and {end}")
    lines = [begin, table(result["rows"]), ""]
    lines += [f"Not measured: `{row['name']}`: {row['reason']}\n" for row in result.get("skipped", ())]
    what = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    page.write_text("\n".join([before + lines[0], *lines[1:], f"Machine: {what}.", end]) + after)


def machine() -> dict[str, Any]:
    """What the figures were taken on, without naming it."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if "model name" in line), "unknown")
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    return asdict(
        _Machine(
            model,
            len(os.sched_getaffinity(0)),
            round(int(memory.split()[1]) / 2**20, 1),
            "amx_tile" in cpuinfo,
            platform.system() + " " + platform.release().split("-")[0],
            platform.python_version(),
            [round(load, 2) for load in os.getloadavg()],
        )
    )


@dataclass(frozen=True)
class _Machine:
    cpu: str
    cores: int
    memory_gib: float
    amx: bool
    system: str
    python: str
    load_before: list[float]
