"""What the suite found, for programs and for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from lmdeploy_deeplink.conformance.precision import PRECISIONS
from lmdeploy_deeplink.conformance.rows import UNTESTED, Row


class Tolerance(msgspec.Struct, frozen=True):
    dtype: str
    unit: float
    tiny: float
    source: str


class Findings(msgspec.Struct, frozen=True, omit_defaults=True):
    """A vendor and its rows; `version` and `device` are empty where it could not run."""

    vendor: str
    rows: list[Row]
    version: str = ""
    device: str = ""

    @property
    def ran(self) -> bool:
        return bool(self.version)


class Report(msgspec.Struct, frozen=True):
    tolerances: list[Tolerance]
    vendors: list[Findings]


def report(vendors: Iterable[Findings]) -> Report:
    return Report([Tolerance(one.dtype, one.unit, one.tiny, one.source) for one in PRECISIONS.values()], list(vendors))


def table(tested: Findings) -> tuple[list[str], list[list[str]]]:
    """The head and the lines: an operator each, with a column per element type."""
    dtypes = [dtype for dtype in PRECISIONS if any(row.dtype == dtype for row in tested.rows)]
    by_place = {(row.operator, row.dtype): row for row in tested.rows}
    operators = dict.fromkeys(row.operator for row in tested.rows)
    lines = []
    for operator in operators:
        cells = [_cell(by_place.get((operator, dtype))) for dtype in dtypes]
        lines.append([operator, *cells] if dtypes else [operator, UNTESTED])
    return ["operator", *(dtypes or ["result"])], lines


def _cell(row: Row | None) -> str:
    return "-" if row is None else f"{row.result} ({row.passed}/{row.passed + row.failed + row.unsupported})"


def reasons(tested: Findings) -> Sequence[str]:
    """Why rows are what they are, each reason once."""
    return list(dict.fromkeys(row.why for row in tested.rows if row.why))
