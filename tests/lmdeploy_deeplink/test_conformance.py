"""The suite on real torch: the reference passes it, and every seeded fault is caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import sections
from seeded import SEEDED

from lmdeploy_deeplink.conformance.report import Report, table
from lmdeploy_deeplink.conformance.rows import PASSED, UNTESTED
from lmdeploy_deeplink.operators.vendor import NAMES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
FLOATS = {"float32", "float16", "bfloat16"}


@pytest.fixture(scope="module")
def conform(in_engine: Any) -> Report:
    found = in_engine("-m", "deeplink.cli", "conform", "--json")
    return msgspec.convert(found, Report)


@pytest.fixture(scope="module")
def seeded(in_engine: Any) -> dict[str, dict[str, Any]]:
    return dict(in_engine(str(HERE / "faults.py")))


def test_the_reference_passes_every_case(conform: Report) -> None:
    (found,) = [one for one in conform.vendors if one.vendor == "reference"]
    assert [row for row in found.rows if row.result != PASSED] == []
    assert sum(row.passed for row in found.rows) >= 1000
    tested = {name: {row.dtype for row in found.rows if row.operator == name} for name in NAMES}
    assert tested == {name: {"float16", "int8"} if name == "transdata" else FLOATS for name in NAMES}
    assert f"({sum(row.passed for row in found.rows)} in all" in (sections.DOCS / "operators.md").read_text()
    _write(conform)


def test_a_vendor_that_is_not_here_is_untested(conform: Report) -> None:
    (found,) = [one for one in conform.vendors if one.vendor == "dlinfer"]
    assert {row.result for row in found.rows} == {UNTESTED}
    assert {row.operator for row in found.rows} == set(NAMES)


@pytest.mark.parametrize("fault", SEEDED)
def test_a_seeded_fault_is_caught(fault: str, seeded: dict[str, dict[str, Any]]) -> None:
    assert seeded[fault]["failed"] > 0, SEEDED[fault]
    assert seeded[fault]["why"]


@pytest.mark.parametrize(("chip", "device", "axes"), [("maca", "cuda", "token head"), ("camb", "mlu", "head token")])
def test_dlinfers_operators_pass_through_the_adapter(in_engine: Any, chip: str, device: str, axes: str) -> None:
    found = in_engine(str(HERE / "dlinfer_package.py"), chip)
    assert (found["version"], found["device"]) == (f"0.2.8 for {chip}", device)
    assert found["axes"] == f"block {axes} dim"
    assert set(found["absent"]) == {"rms_norm_w8a8"}  # takes one parameter more than is known
    results = {(row["operator"], row["result"]) for row in found["rows"]}
    absent = {"fused_attention", "incre_flash_attention", "rms_norm_w8a8", "transdata"}
    assert results == {(name, "unsupported" if name in absent else PASSED) for name in NAMES}
    (partly,) = {row["unsupported"] for row in found["rows"] if row["operator"] == "prefill_attention"}
    assert partly == 3  # with alibi, which its vendor says it does not support


def _write(conform: Report) -> None:
    lines = [
        "## Fused operators of LMDeploy engines",
        "",
        "What `deeplink conform` found where these tests ran ([operators.md](operators.md)): *passed* when every case",
        "held its bound, *failed*, *unsupported* when the vendor says so, *untested* when it cannot run here; in",
        "brackets how many cases passed, of how many.",
    ]
    for one in conform.vendors:
        head, rows = table(one)
        if not one.ran:
            lines += ["", f"**{one.vendor}**: *untested* ({one.rows[0].why.partition(';')[0]})"]
            continue
        lines += ["", f"**{one.vendor}** ({one.version}, on {one.device}):", "", f"| {' | '.join(head)} |"]
        lines += ["|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    sections.write("operators", msgspec.to_builtins(conform), "\n".join(lines))
