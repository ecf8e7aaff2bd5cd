"""The form of a benchmark's result, and the table made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deeplink.bench.rows import Row, Skipped, machine, table, write_table

FAST = Row("fast", 9.5, "GB/s", "memcpy", 10.0, 0.9, "at least", cpu_s_per_gb=0.25, breakdown={"gather": 0.123456})


def test_the_fields() -> None:
    assert FAST.as_json() == {
        "name": "fast",
        "value": 9.5,
        "unit": "GB/s",
        "mark_name": "memcpy",
        "mark": 10.0,
        "ratio": 0.95,
        "goal": "ratio at least 0.9",
        "met": True,
        "cpu_s_per_gb": 0.25,
        "breakdown": {"gather": 0.1235},
    }
    assert Skipped("slow", "no root").as_json() == {"name": "slow", "reason": "no root"}


@pytest.mark.parametrize(
    ("row", "met"),
    [
        (Row("a", 8, "x", "m", 10, 0.9, "at least"), False),
        (Row("a", 8, "x", "m", 10, 0.9, "at most"), True),
        (Row("a", 8, "x", "m", 10, 9, "at most", of="value"), True),
        (Row("a", 8, "x", "m", 0, 0.9, "at least"), True),
        (Row("a", 8, "x", "m", 10), None),
    ],
)
def test_whether_a_goal_is_met(row: Row, met: bool | None) -> None:
    assert row.met is met


def test_a_table_has_a_line_per_row_and_no_column_for_a_cost_that_nobody_has() -> None:
    head, _, line = table([FAST.as_json()]).splitlines()
    assert head.endswith("| CPU s/GB |")
    assert line == "| `fast` | 9.5 GB/s | 10.0 (memcpy) | 0.95 | ratio at least 0.9 | yes | 0.25 |"
    assert "CPU" not in table([Row("a", 1, "x", "m", 2).as_json()])


def test_the_table_goes_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("above\n<!-- kv: begin -->\nold\n<!-- kv: end -->\nbelow\n")
    result = {
        "machine": {"cpu": "some"},
        "rows": [FAST.as_json()],
        "skipped": [Skipped("slow", "no root").as_json()],
    }
    write_table(page, "kv", result)
    once = page.read_text()
    assert once.startswith("above\n<!-- kv: begin -->\n| figure |")
    assert once.endswith("Not measured: `slow`: no root\n\nMachine: cpu some.\n<!-- kv: end -->\nbelow\n")
    write_table(page, "kv", result)
    assert page.read_text() == once
    with pytest.raises(ValueError, match="no lines"):
        write_table(page, "other", result)


def test_the_machine_is_described_and_not_named() -> None:
    about = machine()
    assert set(about) == {"cpu", "cores", "memory_gib", "amx", "system", "python", "load_before"}
