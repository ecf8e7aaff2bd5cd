"""Names of prefixes: the same for the same tokens whatever the page size, and another for anything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.errors import ConfigError
from deeplink.kvconnector.prefixes.names import PageName, pages

TOKENS = st.lists(st.integers(0, 200_000), max_size=200)
UNITS = st.sampled_from([1, 2, 4, 16])


@given(TOKENS, UNITS, st.integers(1, 6), st.integers(1, 6))
def test_pages_of_any_size_have_the_same_units(tokens: list[int], unit: int, some: int, others: int) -> None:
    of_some, of_others = (_units(pages(tokens, unit * count, unit)) for count in (some, others))
    common = min(len(of_some), len(of_others))
    assert of_some[:common] == of_others[:common]
    assert len(of_some) == len(tokens) // (unit * some) * some


@given(TOKENS, UNITS, st.integers(1, 4), st.integers(0, 200))
def test_a_prompt_named_in_two_parts(tokens: list[int], unit: int, count: int, cut: int) -> None:
    """As engines do: what follows a cached prefix is named from the prefix's last name on."""
    page = unit * count
    cut = min(cut, len(tokens)) // page * page
    head = pages(tokens[:cut], page, unit)
    tail = pages(tokens[cut:], page, unit, head[-1] if head else None)
    assert head + tail == pages(tokens, page, unit)
    assert _units(head + tail) == _units(pages(tokens, page, unit))


@given(st.lists(st.integers(0, 3), min_size=8, max_size=8), st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_a_name_stands_for_all_tokens_before_it(ours: list[int], theirs: list[int]) -> None:
    names = zip(_units(pages(ours, 2, 2)), _units(pages(theirs, 2, 2)), strict=True)
    for place, (one, other) in enumerate(names):
        assert (one == other) == (ours[: 2 * place + 2] == theirs[: 2 * place + 2])


def test_salts_and_units_are_part_of_a_name() -> None:
    tokens = list(range(32))
    plain, salted, coarser = pages(tokens, 16, 16), pages(tokens, 16, 16, "ab" * 32), pages(tokens, 16, 8)
    assert not {*_units(plain)} & {*_units(salted), *_units(coarser)}


def test_a_page_is_called_like_its_last_unit() -> None:
    (page,) = pages(range(64), 64, 16)
    assert page == page.units[-1]
    assert isinstance(page, PageName)
    assert len(page.units) == 4


def test_what_is_left_after_the_last_page_has_no_units() -> None:
    *whole, rest = pages(range(40), 16, 16)
    assert [len(page.units) for page in whole] == [1, 1]
    assert rest.units == ()
    assert rest not in pages(range(48), 16, 16)


@pytest.mark.parametrize(("page", "unit"), [(24, 16), (1, 16), (16, 0), (8, 16)])
def test_pages_that_are_not_whole_units_are_refused(page: int, unit: int) -> None:
    with pytest.raises(ConfigError) as caught:
        pages([1, 2, 3], page, unit)
    assert caught.value.field == "unit"


def _units(named: list[PageName]) -> list[str]:
    return [unit for page in named for unit in page.units]
