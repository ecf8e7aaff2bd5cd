"""`deeplink bench kv`, on caches of a few megabytes; how fast it is does not matter here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from deeplink.bench import families, links, run
from deeplink.bench.netlink import Unavailable
from deeplink.bench.scale import QUICK
from deeplink.cli import main

LOCAL = "shm_4096x32k,tcp_loopback_digest,tp_1_2,digest,relayout_nhd_gather"


@pytest.fixture(autouse=True)
def this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of an engine, whatever this machine has."""
    monkeypatch.setattr(run, "engine_python", lambda: None)


def test_rows_that_need_no_root(tmp_path: Path) -> None:
    target = tmp_path / "results" / "kv.json"
    (tmp_path / "README.md").write_text("<!-- kv: begin -->\n<!-- kv: end -->\n")
    arguments = ["bench", "kv", "--quick", "--json", "--rows", LOCAL, "--save", str(target)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["skipped"] == []
    assert {row["name"] for row in result["rows"]} == set(LOCAL.split(","))
    for row in result["rows"]:
        assert set(row) >= {"name", "value", "unit", "mark_name", "mark", "ratio", "goal", "met", "cpu_s_per_gb"}
        assert row["value"] > 0 < row["mark"]
    steps = {row["name"]: row.get("breakdown", {}) for row in result["rows"]}
    assert set(steps["tcp_loopback_digest"]) >= {"whole", "gather", "digest", "push", "verify", "scatter"}
    assert "verify" not in steps["shm_4096x32k"]
    assert json.loads(target.read_text()) == result
    assert "`tp_1_2`" in (tmp_path / "README.md").read_text()
    assert target.with_suffix(".svg").exists() == ("no plot" not in done.stderr)


def test_a_row_that_fails_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    family = families.Family("broken", "deeplink.bench.nothing", ("digest",))
    monkeypatch.setattr(run, "FAMILIES", (family,))
    done = CliRunner().invoke(main, ["bench", "kv", "--quick", "--json", "--rows", "digest"])
    assert done.exit_code == 1
    (skipped,) = json.loads(done.stdout)["skipped"]
    assert skipped["name"] == "digest"
    assert "No module named 'deeplink.bench.nothing'" in skipped["reason"]


def test_the_table_shows_what_is_skipped_and_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"name": "nixl", "reason": "pip install 'deeplink[nixl]'"}
    monkeypatch.setattr(run, "kv", lambda *arguments: {"machine": {}, "rows": [], "skipped": [line]})
    done = CliRunner().invoke(main, ["bench", "kv"])
    assert "deeplink[nixl]" in done.stdout


def test_links_are_skipped_where_there_are_no_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def between(line: object) -> object:
        raise Unavailable("not permitted")

    monkeypatch.setattr(links, "between", between)
    skipped = [row.as_json() for row in links.measure(links.ROWS, QUICK)]
    assert {row["name"] for row in skipped} == set(links.ROWS)
    assert {row["reason"] for row in skipped} == {"not permitted"}


def test_an_unknown_row_is_named() -> None:
    done = CliRunner().invoke(main, ["bench", "kv", "--rows", "fastest"])
    assert done.exit_code == 2
    assert "no row is called 'fastest'" in done.output
