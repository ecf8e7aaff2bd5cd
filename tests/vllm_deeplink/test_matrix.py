"""The support matrix: a run replaces what its own tests wrote, and keeps what the others did."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import matrix
import pytest
from matrix import Matrix

A, B, C = "tests/engines/test_a.py::a", "tests/engines/test_a.py::b", "tests/engines/test_b.py::c"
FP32, BF16 = ("float32", 32, "CPU"), ("bfloat16", 64, "CPU with AMX")


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "support-matrix.json").write_text('{"cells": []}')
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / "tests" / "engines").mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / "engines" / name).touch()
    monkeypatch.setattr(matrix, "DOCS", folder)
    return folder


def run(monkeypatch: pytest.MonkeyPatch, there: set[str], **written: Any) -> None:
    """A session with the tests `there`, of which `written` names those that ran and what each of them wrote."""
    made = Matrix()
    names = {"a": A, "b": B, "c": C}
    for name, (prefill, decode, result) in written.items():
        monkeypatch.setitem(os.environ, "PYTEST_CURRENT_TEST", f"{names[name]} (call)")
        made.record_bytes(prefill, decode, result)
    made.write(there)


def read(docs: Path) -> dict[str, str]:
    cells = json.loads((docs / "support-matrix.json").read_text())["bytes"]
    return {cell["test"]: cell["result"] for cell in cells}


def test_parts_add_up(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, {A, B}, a=(FP32, FP32, "exact"))
    run(monkeypatch, {A, B}, b=(FP32, BF16, "lossy (float32->bfloat16)"))
    run(monkeypatch, {C}, c=(BF16, FP32, "exact"))
    assert read(docs) == {A: "exact (bytes)", B: "lossy (float32->bfloat16, bytes)", C: "exact (bytes)"}
    page = (docs / "support-matrix.md").read_text()
    assert "| | fp32 32 | bf16 amx 64 |" in page
    assert "| fp32 32 | = | ~ |" in page
    assert "| bf16 amx 64 | = | ? |" in page


def test_a_test_replaces_what_it_wrote(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, {A}, a=(FP32, BF16, "exact"))
    run(monkeypatch, {A}, a=(FP32, BF16, "lossy (float32->bfloat16)"))
    assert read(docs) == {A: "lossy (float32->bfloat16, bytes)"}


def test_what_a_test_wrote_that_is_gone_goes(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, {A, B}, a=(FP32, FP32, "exact"), b=(FP32, BF16, "exact"))
    run(monkeypatch, {C}, c=(BF16, FP32, "exact"))
    run(monkeypatch, {A}, a=(FP32, FP32, "exact"))
    assert read(docs).keys() == {A, C}
    (docs.parent / "tests" / "engines" / "test_b.py").unlink()
    run(monkeypatch, {A}, a=(FP32, FP32, "exact"))
    assert read(docs).keys() == {A}
