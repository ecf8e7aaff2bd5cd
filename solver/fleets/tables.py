"""The tables of times that a fleet file names, in whichever format, as rows of one kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deeplink.errors import FleetError
from deeplink.solver.estimates import aiconfigurator, importers, table, vidur
from deeplink.solver.estimates.rates import Measurement
from deeplink.solver.estimates.roofline import Chip
from deeplink.solver.fleets.sections import RatesSection

Near = Callable[[Path], Path]
"""A path as the fleet file means it."""
Wrong = Callable[[tuple[str | int, ...], str, str, str], FleetError]
"""The error for what is at a place of the file: what is wrong, the value, and what to do."""


def read(
    sections: Iterable[RatesSection],
    model: str,
    chips: Mapping[str, Chip],
    config: Mapping[str, Any],
    near: Near,
    wrong: Wrong,
) -> list[Measurement]:
    """All rows of all tables; `config` is the model's. Raises FleetError or RateError."""
    found: list[Measurement] = []
    for index, section in enumerate(sections):
        rows = _table(index, section, model, chips, config, near, wrong)
        if section.engine is None:
            found += rows
            continue
        for row in rows:
            if row.engine not in ("", section.engine):
                raise wrong(
                    ("rates", index, "engine"),
                    f"the table says that line {row.line} is of {row.engine}",
                    section.engine,
                    "leave it out, or give each engine a table of its own",
                )
            found.append(replace(row, engine=section.engine))
    return found


def _table(
    index: int,
    section: RatesSection,
    model: str,
    chips: Mapping[str, Chip],
    config: Mapping[str, Any],
    near: Near,
    wrong: Wrong,
) -> list[Measurement]:
    path = near(section.table)
    if section.format == "csv":
        return table.read(path)
    if section.format == "splitwise":
        return importers.splitwise(path)
    if section.chip not in chips:
        why, known = "no pool has this chip", ", ".join(sorted(chips))
        raise wrong(("rates", index, "chip"), why, section.chip, f"one of {known}")
    if section.format == "vllm-bench":
        return importers.vllm_bench(path, chip=section.chip, tp=section.tp, model=model)
    put_together = aiconfigurator.read if section.format == "aiconfigurator" else vidur.read
    return put_together(path, chips[section.chip], config, model, section.tp)
