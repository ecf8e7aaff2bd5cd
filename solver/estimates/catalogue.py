"""The chips and models that come along: published peaks, fitted fractions, configs of the models of the tables."""

from __future__ import annotations

import csv
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from deeplink.errors import FleetError
from deeplink.solver.estimates import model as models
from deeplink.solver.estimates import roofline
from deeplink.solver.estimates.model import Model
from deeplink.solver.estimates.roofline import Chip, Fractions

BUS = 32e9
"""Bytes a second one way of PCIe 4.0 x16, which is assumed where the link between a host's chips is not known."""
_DATA = files("deeplink.solver") / "data"


@cache
def sheets() -> dict[str, dict[str, str]]:
    """Every chip's row of chips.csv, blank where nothing citable was read."""
    with (_DATA / "chips.csv").open(encoding="utf-8") as file:
        return {row["chip"]: row for row in csv.DictReader(file)}


def chip(name: str) -> Chip:
    """Raises FleetError for a chip that is not known, or of which a figure is not known that the solver needs."""
    row = sheets().get(name)
    if row is None:
        raise FleetError(
            f"no chip is called {name!r}",
            field="chip",
            ours=name,
            theirs=", ".join(sorted(sheets())),
            remedy="use one of the names, or describe the chip under [[chips]]",
        )
    half, eight = _best(row, "bf16_fp16_dense_tflops", "measured_bf16_tflops"), _first(row["int8_dense_tops"])
    eight = _first(row["fp8_dense_tflops"]) or eight
    memory, bandwidth = _first(row["mem_gb"]), _best(row, "mem_bw_gbs", "measured_mem_bw_gbs")
    for value, key in ((half, "tflops"), (memory, "memory_gb"), (bandwidth, "memory_gb_per_s")):
        if not value:
            raise FleetError(
                f"no {key} of {name} is published that could be cited",
                field=key,
                remedy=f"measure it and describe the chip under [[chips]], with {key}",
            )
    link = _link(row)
    source = f"{row['confidence']}: {row['source']}"
    flops = [("16bit", half * 1e12)] + ([("8bit", eight * 1e12)] if eight else [])
    return Chip(
        name=name,
        flops=tuple(flops),
        memory=memory * 1e9,
        bandwidth=bandwidth * 1e9,
        link=link or BUS,
        watts=_first(row["tdp_w"]),
        source=source if link else f"{source}; link between chips not known, a PCIe 4.0 x16 bus assumed",
    )


@cache
def fractions(chip: Chip) -> Fractions:
    """Those fitted to measurements of the chip, or the usual ones."""
    with (_DATA / "fractions.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["chip"] == chip.name:
                return Fractions(
                    float(row["compute"]), float(row["memory"]), float(row["fixed"]), float(row["error"]), row["source"]
                )
    return roofline.usual(chip)


@cache
def known_models() -> dict[str, Model]:
    """The models of the tables, by the names used there."""
    configs: dict[str, Any] = json.loads((_DATA / "models.json").read_text(encoding="utf-8"))
    return {name: models.parse(config, name) for name, config in configs.items()}


def _first(text: str) -> float:
    match = re.match(r"\s*([0-9.]+)", text)
    return float(match[1]) if match else 0.0


def _best(row: dict[str, str], rated: str, measured: str) -> float:
    """The measured figure where it is lower than the rated one by more than is usual, for some rated figures are
    wishes; else the rated one, to which the fractions apply."""
    what, seen = _first(row[rated]), _first(row[measured])
    if not what or not seen:
        return what or seen
    return seen if seen < 0.6 * what else what


def _link(row: dict[str, str]) -> float:
    """Bytes a second one way. Where the convention is not stated nothing is assumed."""
    value = _first(row["intra_node_link_gbs"]) * 1e9
    convention = row["link_bw_convention"]
    if convention.startswith("single direction"):
        return value
    return value / 2 if convention.startswith("bidirectional") else 0.0
