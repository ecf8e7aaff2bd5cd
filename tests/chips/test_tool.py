"""A vendor's tool as a real program: it answers, fails, hangs, floods, leaves children behind, or is not there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deeplink.chips import detect
from deeplink.chips.catalogue import PROFILES
from deeplink.chips.tool import Answer, run

Program = Callable[[str], str]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    def _program(script: str) -> str:
        path = tmp_path / "smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return _program


def test_it_answers(program: Program) -> None:
    assert run([program('echo "$1" "$LC_ALL"; echo noise >&2'), "hello"], 5) == Answer("answered", "hello C\n")


def test_it_gets_no_input(program: Program) -> None:
    assert run([program("cat; echo end")], 5) == Answer("answered", "end\n")


def test_it_fails(program: Program) -> None:
    answer = run([program("echo out; echo first >&2; echo no device >&2; exit 9")], 5)
    assert answer.ending == "failed"
    assert answer.detail.endswith("ended with 9: no device")
    assert "no words" in run([program("exit 1")], 5).detail


def test_it_dies_of_a_signal(program: Program) -> None:
    assert "ended with -9" in run([program("kill -9 $$")], 5).detail


def test_it_is_not_there() -> None:
    assert run(["deeplink-no-such-smi"], 5) == Answer("absent", detail="deeplink-no-such-smi is not installed")


def test_it_is_elsewhere(tmp_path: Path, program: Program) -> None:
    program("echo here")
    assert run(["smi"], 5, [str(tmp_path)]) == Answer("answered", "here\n")


def test_it_cannot_be_started(tmp_path: Path) -> None:
    path = tmp_path / "smi"
    path.write_text("not a program")
    path.chmod(0o755)
    assert run([str(path)], 5).ending == "failed"


@pytest.mark.parametrize(
    "script",
    [
        "sleep 30",
        "trap '' TERM INT HUP; sleep 30",
        "echo begun; sleep 30",
        "sleep 30 & wait",
        "exec 1>&- 2>&-; sleep 30",  # closes its output, and stays
    ],
)
def test_it_hangs(program: Program, script: str) -> None:
    path, start = program(script), time.monotonic()
    answer = run([path], 0.3)
    assert answer.ending == "timeout"
    assert "did not answer within 300 ms" in answer.detail
    assert time.monotonic() - start < 2


def test_what_it_started_is_killed_with_it(tmp_path: Path, program: Program) -> None:
    mark = tmp_path / "mark"
    run([program(f"(sleep 1; touch {mark}) & sleep 30")], 0.2)
    time.sleep(1.3)
    assert not mark.exists()


def test_a_child_that_keeps_the_output_open_is_not_waited_for(program: Program) -> None:
    start = time.monotonic()
    assert run([program("sleep 30 & echo done")], 0.3).ending == "timeout"
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("stream", ["", " >&2"])
def test_it_prints_without_end(program: Program, stream: str) -> None:
    answer = run(
        [program(f"while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done{stream}")], 20
    )
    assert answer.ending == "failed"
    assert "printed more than" in answer.detail


def test_bytes_that_are_no_text(program: Program) -> None:
    assert run([program(r"printf '\377\376ok'")], 5).text.endswith("ok")


def test_no_descriptor_is_left_open(program: Program) -> None:
    path, before = program("sleep 30"), set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run([path], 0.05)
    assert len(set(os.listdir("/proc/self/fd"))) <= len(before)


def test_a_tool_that_hangs_costs_detection_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from host import Host

    host = Host(tmp_path / "root")
    host.pci("0000:17:00.0", "10de:2330", "030200", "nvidia")
    host.nodes("/dev/nvidia0")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\nsleep 30\n")
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    found = detect.detect(PROFILES, host.root)
    assert found.found[0].cards[0].chip == "nvidia-h100-sxm"
    assert found.found[0].asked[0].ending == "timeout"
    assert found.milliseconds < 1000  # 120 ms and the machine's load
