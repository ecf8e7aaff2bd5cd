"""Results of vLLM's own benchmark as measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from described import FLEET, write

from deeplink.errors import FleetError, RateError
from deeplink.solver.estimates import importers, table
from deeplink.solver.fleets import fleetfile

RESULT = {
    "date": "20261129-120000",
    "model_id": "Qwen3-32B",
    "request_rate": "inf",
    "max_concurrency": 1,
    "completed": 10,
    "total_input_tokens": 20000,
    "total_output_tokens": 3000,
    "median_ttft_ms": 600.0,
    "median_itl_ms": 20.0,
}


def result(path: Path, **change: object) -> Path:
    path.write_text(json.dumps({**RESULT, **change}))
    return path


def read(path: Path) -> list[importers.Measurement]:
    return importers.vllm_bench(path, chip="c", tp=2, model="m")


def test_one_at_a_time_is_both(tmp_path: Path) -> None:
    prefill, decode = read(result(tmp_path / "a.json"))
    assert (prefill.phase, prefill.requests, prefill.tokens, prefill.seconds) == ("prefill", 1, 2000, 0.6)
    assert (decode.phase, decode.requests, decode.context, decode.seconds) == ("decode", 1, 2150.0, 0.02)
    assert "a.json" in prefill.source


def test_many_at_a_time_are_decode(tmp_path: Path) -> None:
    result(tmp_path / "b.json", max_concurrency=16, median_itl_ms=30.0)
    result(tmp_path / "a.json")
    rows = read(tmp_path)
    assert [(row.phase, row.requests) for row in rows] == [("prefill", 1), ("decode", 1), ("decode", 16)]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"request_rate": 4.0}, "request_rate"),
        ({"max_concurrency": None}, "max_concurrency"),
        ({"completed": 0}, "completed"),
        ({"median_itl_ms": "fast"}, "median_itl_ms"),
        ({"median_ttft_ms": float("nan")}, "median_ttft_ms"),
    ],
)
def test_what_says_nothing(tmp_path: Path, change: dict[str, object], field: str) -> None:
    with pytest.raises(RateError) as caught:
        read(result(tmp_path / "a.json", **change))
    assert caught.value.field == field


def test_no_result(tmp_path: Path) -> None:
    with pytest.raises(RateError, match="no results"):
        read(tmp_path)
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(RateError, match="not a result"):
        read(tmp_path)


def test_in_a_fleet(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    result(tmp_path / "bench" / "a.json")
    section = '[[rates]]\ntable = "bench"\nformat = "vllm-bench"\nchip = "NVIDIA H20"\ntp = 2\n'
    fleet = fleetfile.load(write(tmp_path, FLEET + section))
    assert [(row.chip, row.tp, row.phase) for row in fleet.measurements] == [
        ("NVIDIA H20", 2, "prefill"),
        ("NVIDIA H20", 2, "decode"),
    ]
    with pytest.raises(FleetError) as caught:
        fleetfile.load(write(tmp_path, FLEET + section.replace("H20", "H21")))
    assert caught.value.field == "rates[0].chip"


def test_a_parquet_file_is_read_as_a_csv_is(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        importers.Measurement(
            chip="c",
            model="m",
            tp=2,
            phase="decode",
            requests=n,
            tokens=1,
            context=2000.5,
            seconds=0.02 * n,
            source="a, b",
        )
        for n in (1, 2)
    ]
    (tmp_path / "rates.csv").write_text(table.write(rows))
    columns = {name: [getattr(row, name) for row in rows] for name in table.COLUMNS}
    parquet.write_table(arrow.table(columns), tmp_path / "rates.parquet")
    assert table.read(tmp_path / "rates.parquet") == table.read(tmp_path / "rates.csv")
    columns["seconds"] = [0.02, -1.0]
    parquet.write_table(arrow.table(columns), tmp_path / "wrong.parquet")
    with pytest.raises(RateError, match="line 3") as caught:
        table.read(tmp_path / "wrong.parquet")
    assert caught.value.field == "seconds"
    (tmp_path / "none.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(RateError, match="cannot read"):
        table.read(tmp_path / "none.parquet")
