"""Where the search starts: from what runs now, if that serves the workload. Then no answer is worse than what runs, and
what is dearer is not looked at."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from deeplink.solver.exact import highs
from deeplink.solver.exact.highs import Effort
from deeplink.solver.exact.program import Model

_ENOUGH = Effort(gap=0.05, seconds=10.0, nodes=20)


def start(model: Model, terms: Mapping[int, float], *, maximise: bool) -> tuple[float, ...]:
    """A solution with none but engines that run now (`Candidate.current`), no more of each pool, role and size than
    there are; empty where nothing runs or it does not suffice."""
    running: dict[tuple[int, str, int], int] = {}
    for candidate in model.problem.candidates:
        kind = candidate.pool, candidate.role, candidate.chips
        running[kind] = max(candidate.current, running.get(kind, 0))
    if not any(running.values()):
        return ()
    only = copy.deepcopy(model.program)
    for (pool, role, chips), count in running.items():
        mine = [k for k, c in enumerate(model.problem.candidates) if (c.pool, c.role, c.chips) == (pool, role, chips)]
        only.row(model.count(dict.fromkeys(mine, 1.0)), 0.0, float(count))
    return highs.solve(only, terms, maximise=maximise, effort=_ENOUGH).values
