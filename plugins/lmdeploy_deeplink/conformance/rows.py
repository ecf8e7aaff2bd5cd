"""What came of a vendor's cases, in rows: one per operator and element type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

PASSED = "passed"
FAILED = "failed"
UNSUPPORTED = "unsupported"
UNTESTED = "untested"


class Outcome(msgspec.Struct, frozen=True):
    """`why` is empty when it passed."""

    operator: str
    dtype: str
    case: str
    result: str
    why: str


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """`result` is *failed* when one case failed, *passed* when none did and one passed, else *unsupported*.

    *untested* is an operator, or all of a vendor, that no case was run of; `why` says the first reason there is.
    """

    vendor: str
    operator: str
    dtype: str
    result: str
    passed: int = 0
    failed: int = 0
    unsupported: int = 0
    why: str = ""


def rows(vendor: str, outcomes: Iterable[Outcome]) -> list[Row]:
    grouped: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        grouped.setdefault((outcome.operator, outcome.dtype), []).append(outcome)
    return [_row(vendor, *key, grouped[key]) for key in sorted(grouped)]


def _row(vendor: str, operator: str, dtype: str, outcomes: Sequence[Outcome]) -> Row:
    counts = Counter(outcome.result for outcome in outcomes)
    result = next(kind for kind in (FAILED, PASSED, UNSUPPORTED) if counts[kind])
    why = next((f"{one.case}: {one.why}" for one in outcomes if one.result == FAILED), "")
    if result == UNSUPPORTED:
        why = outcomes[0].why
    return Row(vendor, operator, dtype, result, counts[PASSED], counts[FAILED], counts[UNSUPPORTED], why)


def untested(vendor: str, operators: Iterable[str], why: str) -> list[Row]:
    """Rows for a vendor that cannot run here."""
    return [Row(vendor, operator, "", UNTESTED, why=why) for operator in operators]
