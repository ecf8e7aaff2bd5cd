"""A vendor through the suite, one call at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from deeplink.errors import UnsupportedOperator
from lmdeploy_deeplink.conformance.case import Case
from lmdeploy_deeplink.conformance.rows import FAILED, PASSED, UNSUPPORTED, Outcome
from lmdeploy_deeplink.operators.vendor import Vendor

# What a vendor's operator may raise and the suite goes on: anything that is not about this process ending.
_RAISED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def run(vendor: Vendor, cases: Iterable[Case]) -> Iterator[Outcome]:
    """One outcome per case. A case that raises has failed; one that raises UnsupportedOperator is unsupported."""
    for case in cases:
        trial = None
        try:
            operator = vendor.get(case.operator)
            trial = case.make(vendor)
            wrong = trial.wrong(operator(**trial.keywords))
        except UnsupportedOperator as exc:
            yield Outcome(case.operator, case.dtype, case.name, UNSUPPORTED, str(exc))
            continue
        except _RAISED as exc:
            if trial is None:
                raise  # the suite's own, not the vendor's
            wrong = f"raised {exc!r}"
        yield Outcome(case.operator, case.dtype, case.name, FAILED if wrong else PASSED, wrong)
