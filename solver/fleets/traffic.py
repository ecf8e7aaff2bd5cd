"""Requests to try a placement with: a recorded trace, or made as the workload says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from deeplink.solver.fleets import trace
from deeplink.solver.fleets.fleet import Fleet, Request


def requests(fleet: Fleet, path: Path | None, count: int, rate: float, seed: int) -> list[Request]:
    """At `rate` times the workload's rate. A trace is stretched to it, with its bursts."""
    load = fleet.workload
    if path is None and fleet.replay:
        return trace.scaled(fleet.replay, rate)
    if path is None:
        return trace.made(replace(load, rate=load.rate * rate), count, seed)
    found = trace.read(path)
    return trace.scaled(found, load.rate * rate * found[-1].at / (len(found) - 1))
