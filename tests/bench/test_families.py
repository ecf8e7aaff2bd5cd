"""Every row is in one family, and can be asked for by name or by pattern."""

from __future__ import annotations

from importlib import import_module

import pytest

from deeplink.bench.families import FAMILIES, NAMES, chosen


def test_families_list_what_their_modules_measure() -> None:
    modules = {family.module for family in FAMILIES}
    for module in modules:
        listed = {row for family in FAMILIES if family.module == module for row in family.rows}
        assert listed == set(import_module(module).ROWS), module
    assert len(NAMES) == len(set(NAMES))


def test_rows_are_chosen_by_name_and_pattern_in_their_own_order() -> None:
    assert chosen([]) == NAMES
    assert chosen(["tcp_loopback", "shm_4096x32k"]) == ("shm_4096x32k", "tcp_loopback")
    assert chosen(["digest*"]) == ("digest", "digest_cpu_vec", "digest_cpu_amx")
    with pytest.raises(ValueError, match="no row is called 'nothing'"):
        chosen(["nothing", "digest"])
