"""Outcomes into rows, and rows into what is printed."""

from __future__ import annotations

import msgspec

from lmdeploy_deeplink.conformance import report
from lmdeploy_deeplink.conformance.report import Findings
from lmdeploy_deeplink.conformance.rows import FAILED, PASSED, UNSUPPORTED, UNTESTED, Outcome, Row, rows, untested


def outcome(result: str, operator: str = "linear", dtype: str = "float32", why: str = "") -> Outcome:
    return Outcome(operator, dtype, f"{operator} {dtype}", result, why)


def test_one_failure_fails_a_row() -> None:
    (row,) = rows(
        "mine", [outcome(PASSED), outcome(FAILED, why="off"), outcome(UNSUPPORTED, why="no"), outcome(PASSED)]
    )
    assert row == Row("mine", "linear", "float32", FAILED, 2, 1, 1, "linear float32: off")


def test_what_is_partly_there_passed() -> None:
    (row,) = rows("mine", [outcome(UNSUPPORTED, why="no alibi"), outcome(PASSED)])
    assert (row.result, row.passed, row.unsupported, row.why) == (PASSED, 1, 1, "")


def test_what_is_not_there_says_why() -> None:
    (row,) = rows("mine", [outcome(UNSUPPORTED, why="no alibi")])
    assert (row.result, row.why) == (UNSUPPORTED, "no alibi")


def test_a_row_is_an_operator_and_an_element_type() -> None:
    made = rows("mine", [outcome(PASSED), outcome(PASSED, dtype="float16"), outcome(PASSED, "rms_norm")])
    assert [(row.operator, row.dtype) for row in made] == [
        ("linear", "float16"),
        ("linear", "float32"),
        ("rms_norm", "float32"),
    ]


def test_a_vendor_that_cannot_run_is_untested_by_the_row() -> None:
    made = untested("theirs", ("linear", "rms_norm"), "not installed")
    assert [(row.operator, row.result, row.why) for row in made] == [
        ("linear", UNTESTED, "not installed"),
        ("rms_norm", UNTESTED, "not installed"),
    ]
    assert report.table(Findings("theirs", made)) == (
        ["operator", "result"],
        [["linear", "untested"], ["rms_norm", "untested"]],
    )


def test_a_table_has_a_column_per_element_type() -> None:
    tested = Findings("mine", rows("mine", [outcome(PASSED), outcome(FAILED, dtype="float16", why="off")]), "1", "cpu")
    assert report.table(tested) == (
        ["operator", "float32", "float16"],
        [["linear", "passed (1/1)", "failed (0/1)"]],
    )
    assert report.reasons(tested) == ["linear float16: off"]


def test_a_report_names_the_source_of_every_tolerance() -> None:
    made = msgspec.json.decode(msgspec.json.encode(report.report([])))
    assert {one["dtype"] for one in made["tolerances"]} == {"float32", "float16", "bfloat16", "int8"}
    assert all(one["source"] for one in made["tolerances"])
