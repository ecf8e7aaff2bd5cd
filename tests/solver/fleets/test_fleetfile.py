"""A wrong fleet file is refused with the line, the field and what to do."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest
from described import FLEET, write

from deeplink.errors import FleetError, RateError
from deeplink.solver.estimates import table
from deeplink.solver.fleets import fleetfile, trace
from deeplink.solver.fleets.lines import line


def test_a_right_one(tmp_path: Path) -> None:
    fleet = fleetfile.load(write(tmp_path))
    assert [pool.name for pool in fleet.pools] == ["hopper", "h20"]
    assert fleet.connections[0].rate == 50e9
    assert fleet.workload.buckets[0].share == 1.0


WRONG = [
    ("rate = 6", "rate = -6", "workload.rate"),
    ("rate = 6", "rate = inf", "workload.rate"),
    ("prompt = 2000", "prompt = 0", "workload.lengths[0].prompt"),
    ("ttft = 3.0", "ttft = 0", "service.ttft"),
    ("tpot = 0.05", "tpot = nan", "service.tpot"),
    ('chip = "NVIDIA H20"', 'chip = "NVIDIA H21"', "pools[1].chip"),
    ('chip = "NVIDIA H20"', 'chip = "MetaX C500"', "pools[1].chip"),
    ("count = 8\nprice = 1.2", "count = 0\nprice = 1.2", "pools[1].count"),
    ("price = 1.2", "price = -1", "pools[1].price"),
    ('name = "h20"', 'name = "hopper"', "pools[1].name"),
    ("tp = [2]\n\n[[pools]]", "tp = [3]\n\n[[pools]]", "pools[0].tp"),
    ("tp = [2]\n\n[[links]]", "tp = [2]\ncolour = 1\n\n[[links]]", "pools[1].colour"),
    ('to = "h20"', 'to = "h21"', "links[0].to"),
    ('from = "hopper"', 'from = "copper"', "links[0].from"),
    ("gb_per_s = 50", "gb_per_s = 0", "links[0].gb_per_s"),
    ('convention = "one-way"', 'convention = "total"', "links[0].convention"),
    ('convention = "one-way"\n', "", "links[0].convention"),
    ('objective = "cost"', 'objective = "glory"', "objective"),
    ("version = 1", "version = 2", "version"),
    ("price = 1.2", 'price = 1.2\nkv_dtype = "int3"', "pools[1].kv_dtype"),
    ("price = 1.2", 'price = 1.2\ncontract = "none.json"', "pools[1].contract"),
    ('config = "config.json"', 'config = "none.json"', "model.config"),
]


@pytest.mark.parametrize(("old", "new", "field"), WRONG, ids=[f"{f}: {new!r}" for _, new, f in WRONG])
def test_a_wrong_one(tmp_path: Path, old: str, new: str, field: str) -> None:
    assert old in FLEET
    text = FLEET.replace(old, new, 1)
    with pytest.raises(FleetError) as caught:
        fleetfile.load(write(tmp_path, text))
    error = caught.value
    assert error.field == field
    assert error.remedy
    assert error.line > 0
    assert f"fleet.toml:{error.line}:" in error.message
    key = field.rpartition(".")[2].split("[")[0]
    lines = text.splitlines()
    assert lines[error.line - 1].startswith((key, "[[")), lines[error.line - 1]


@pytest.mark.parametrize(
    ("old", "new", "ours", "remedy"),
    [
        ("count = 8\nprice = 1.2", "count = 0\nprice = 1.2", "0", "at least 1"),
        ("price = 1.2", "price = -1", "-1", "at least 0"),
        ("gb_per_s = 50", "gb_per_s = 0", "0", "more than 0"),
        ('convention = "one-way"\n', "", "", "add it"),
        ('convention = "one-way"', 'convention = "total"', "'total'", "'one-way' or 'both-ways'"),
        ("tp = [2]\n\n[[links]]", "tp = [2]\ncolour = 1\n\n[[links]]", "1", "correct its name"),
    ],
)
def test_the_remedy_says_what_to_write(tmp_path: Path, old: str, new: str, ours: str, remedy: str) -> None:
    with pytest.raises(FleetError) as caught:
        fleetfile.load(write(tmp_path, FLEET.replace(old, new, 1)))
    assert caught.value.ours == ours
    assert remedy in caught.value.remedy


def test_no_pools(tmp_path: Path) -> None:
    text = FLEET[: FLEET.index("[[pools]]")]
    for inventory in ("", "pools = []\n"):
        with pytest.raises(FleetError) as caught:
            fleetfile.load(write(tmp_path, inventory + text))
        assert caught.value.field == "pools"
        assert caught.value.remedy


def test_links_twice(tmp_path: Path) -> None:
    link = FLEET[FLEET.index("[[links]]") :]
    with pytest.raises(FleetError) as caught:
        fleetfile.load(write(tmp_path, FLEET + link))
    assert caught.value.field == "links[1]"
    assert caught.value.line == FLEET.count("\n") + 1


def test_an_empty_inventory(tmp_path: Path) -> None:
    text = FLEET[: FLEET.index("[[pools]]")] + "pools = []\n"
    text = "pools = []\n" + FLEET[: FLEET.index("[[pools]]")]
    with pytest.raises(FleetError) as caught:
        fleetfile.load(write(tmp_path, text))
    assert caught.value.field == "pools"
    assert caught.value.line == 1


def test_not_toml_and_not_there(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="not TOML"):
        fleetfile.load(write(tmp_path, "version = = 1"))
    with pytest.raises(FleetError, match="cannot read"):
        fleetfile.load(tmp_path / "none.toml")


def test_both_ways_is_half_each_way(tmp_path: Path) -> None:
    text = FLEET.replace('"one-way"', '"both-ways"') + "both = true\n"
    fleet = fleetfile.load(write(tmp_path, text))
    assert [(c.source, c.target, c.rate) for c in fleet.connections] == [
        ("hopper", "h20", 25e9),
        ("h20", "hopper", 25e9),
    ]


def test_a_table_that_cannot_be(tmp_path: Path) -> None:
    header = "chip,model,tp,phase,requests,tokens,context,seconds,source\n"
    (tmp_path / "rates.csv").write_text(header + "NVIDIA H20,Qwen3-32B,2,prefill,1,2000,0,0.0001,me\n")
    path = write(tmp_path, FLEET + '[[rates]]\ntable = "rates.csv"\n')
    with pytest.raises(RateError) as caught:
        fleetfile.load(path)
    assert "line 2" in caught.value.message
    assert caught.value.field == "seconds"
    assert float(caught.value.ours) == 0.0001


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ("NVIDIA H20,m,2,chew,1,2000,0,0.1,me", "phase"),
        ("NVIDIA H20,m,0,prefill,1,2000,0,0.1,me", "tp"),
        ("NVIDIA H20,m,2,prefill,1,2000,0,-1,me", "seconds"),
        ("NVIDIA H20,m,2,prefill,1,2000,0,x,me", "seconds"),
        ("NVIDIA H20,m,2,prefill,1,2000,0,nan,me", "seconds"),
        ("NVIDIA H20,m,2,prefill,1,2000,x,0.1,me", "context"),
        ("NVIDIA H20,m,2,prefill,1,2000,64,0.1,me", "context"),
    ],
)
def test_a_wrong_row(tmp_path: Path, row: str, column: str) -> None:
    (tmp_path / "rates.csv").write_text("chip,model,tp,phase,requests,tokens,context,seconds,source\n" + row + "\n")
    with pytest.raises(RateError) as caught:
        fleetfile.load(write(tmp_path, FLEET + '[[rates]]\ntable = "rates.csv"\n'))
    assert caught.value.field == column
    assert "line 2" in caught.value.message


def test_a_table_that_is_no_csv(tmp_path: Path) -> None:
    (tmp_path / "rates.csv").write_text("chip," + "x" * 200_000)
    with pytest.raises(RateError, match="is not a CSV"):
        table.read(tmp_path / "rates.csv")


def test_a_trace(tmp_path: Path) -> None:
    rows = "\n".join(f"2023-11-16 18:00:{i % 60:02d}.0000000,{100 * (i + 1)},{10 + i}" for i in range(50))
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows + "\n")
    start, end = FLEET.index("rate = 6"), FLEET.index("[service]")
    text = FLEET[:start] + 'trace = "trace.csv"\n' + FLEET[end:]
    fleet = fleetfile.load(write(tmp_path, text))
    assert fleet.workload.rate == pytest.approx(1.0)
    assert sum(bucket.share for bucket in fleet.workload.buckets) == pytest.approx(1.0)
    assert not math.isnan(fleet.workload.burstiness)
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,x,1\n")
    with pytest.raises(FleetError, match=r"trace\.csv:2"):
        fleetfile.load(write(tmp_path, text))


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
FIRST, SECOND = "2023-11-16 18:00:00,5,1", "2023-11-16 18:00:01,5,1"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (f"{HEADER}\n{FIRST}\n", "fewer than two requests"),
        (f"{HEADER}\n{FIRST}\n2023-11-16 18:00:01,-5,1\n", ":3: not a request: its prompt has -5 tokens"),
        (f"{HEADER}\n{FIRST}\n2023-11-16 18:00:01,5,{1 << 40}\n", ":3: not a request: its answer has"),
        (f"{HEADER}\n{FIRST}\n2033-11-16 18:00:01,5,1\n", "covers 3653 days"),
        (f"TIMESTAMP,ContextTokens\n{FIRST[:-2]}\n", ":2: not a request: it has no GeneratedTokens"),
        (f"{HEADER}\n{'5' * 200_000}\n", ":2: not a request: field larger"),
        ('{"timestamp": 1e999, "input_length": 5, "output_length": 1}\n' * 2, ":1: not a request: its time is inf"),
        ('{"timestamp": 1, "output_length": 1}\n', ":1: not a request: it has no input_length"),
        ('{"timestamp": 1, "input_length": "x", "output_length": 1}\n', ":1: not a request"),
        ('{"a": ' + "[" * 100_000, ":1: not a request"),
    ],
    ids=range(10),
)
def test_a_wrong_trace(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / "trace").write_text(content)
    with pytest.raises(FleetError) as caught:
        trace.read(tmp_path / "trace")
    assert why in caught.value.message
    assert caught.value.field == "workload.trace"
    assert caught.value.remedy


@pytest.mark.parametrize("data", [gzip.compress(b"x" * 99)[:20], gzip.compress(b"x" * 99)[:10] + b"yyyyyyyyyy", b"no"])
def test_what_is_not_packed(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "packed.gz").write_bytes(data)
    with pytest.raises(FleetError, match="cannot read the trace"):
        trace.read(tmp_path / "packed.gz")
    with pytest.raises(RateError, match="cannot read"):
        table.read(tmp_path / "packed.gz")


def test_what_is_nested_without_end(tmp_path: Path) -> None:
    path = write(tmp_path, "version = " + "[" * 100_000)
    with pytest.raises(FleetError, match="is not TOML"):
        fleetfile.load(path)
    path = write(tmp_path, FLEET)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(FleetError, match="cannot read the model's config"):
        fleetfile.load(path)


def test_lines() -> None:
    text = 'a = 1\n[b]\nc = 2\n[[d]]\ne = 3\n[[d]]\n# no\n"e" = 4\n[d.f]\ng = 5\n'
    assert line(text, ("a",)) == 1
    assert line(text, ("b", "c")) == 3
    assert line(text, ("d", 0, "e")) == 5
    assert line(text, ("d", 1, "e")) == 8
    assert line(text, ("d", 1, "f", "g")) == 10
    assert line(text, ("d", 1, "missing")) == 6
    assert line(text, ("nothing",)) == 0
