"""All cases."""

from __future__ import annotations

from collections.abc import Iterator

from lmdeploy_deeplink.conformance import (
    attention_cases,
    cache_cases,
    elementwise_cases,
    expert_cases,
    matmul_cases,
    norm_cases,
)
from lmdeploy_deeplink.conformance.case import Case

_FAMILIES = (norm_cases, elementwise_cases, attention_cases, cache_cases, expert_cases, matmul_cases)


def cases() -> Iterator[Case]:
    """In a fixed order; a case that is alike in all vendors, and in every run."""
    for family in _FAMILIES:
        yield from family.cases()
