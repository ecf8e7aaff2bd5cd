"""`deeplink doctor` as it is called: for people, for scripts, and by its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from looking import BASE, SECRET, Listening, listening

from deeplink import __version__
from deeplink.cli import main
from deeplink.errors import Reason

FAST = ("--size=1", "--seconds=10")


def run(*arguments: str, text: str | None = BASE) -> Result:
    if text is not None:
        Path("deeplink.toml").write_text(text)
        arguments = (*arguments, "--config=deeplink.toml")
    return CliRunner().invoke(main, ["doctor", *FAST, *arguments])


def document(result: Result, code: int) -> dict[str, Any]:
    assert result.exit_code == code, (result.output, result.exception)
    found: dict[str, Any] = json.loads(result.stdout)
    assert set(found) == {"deeplink", "exit_code", "sections"}
    assert (found["deeplink"], found["exit_code"]) == (__version__, code)
    for section in found["sections"]:
        assert set(section) == {"name", "findings"}
        for finding in section["findings"]:
            assert set(finding) == {"name", "standing", "text", "reason", "facts"}
            assert finding["standing"] in ("works", "off", "warning", "failed", "unknown")
            if finding["reason"] is not None:
                assert {"code", "message"} <= set(finding["reason"]) <= set(Reason.__struct_fields__)
            if finding["standing"] in ("warning", "failed", "unknown"):
                assert finding["text"] or finding["reason"]
    return found


def sections(found: dict[str, Any]) -> list[str]:
    return [section["name"] for section in found["sections"]]


def test_here() -> None:
    found = document(run("--json"), 0)
    assert sections(found) == ["deeplink", "chips", "engines", "transports"]


def test_for_people() -> None:
    result = run()
    assert result.exit_code == 0
    for text in ("deeplink", "engines", "transports", "tcp", "works", "GB/s there", 'trust = "fabric"'):
        assert text in result.stdout
    assert SECRET.decode() not in result.output


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_the_secret_is_never_shown(option: tuple[str, ...]) -> None:
    with listening() as other:
        result = run(f"--peer-host={other.address}", *option)
    assert result.exit_code == 0, result.output
    for text in (SECRET.decode(), SECRET.hex()):
        assert text not in result.output


def test_a_wrong_configuration() -> None:
    found = document(run("--json", "--peer=a", "--peer-host=127.0.0.1:1", text="roter = 1"), 2)
    assert sections(found) == [
        "deeplink",
        "chips",
        "engines",
        "transports",
        "peer a",
        "canary a",
        "link to 127.0.0.1:1",
    ]
    result = run(text="roter = 1")
    assert result.exit_code == 2
    assert "roter" in result.stdout
    assert document(run("--json", "--config=gone.toml", text=None), 2)


def test_a_plugin_that_fails(install: Callable[[str, str], None]) -> None:
    install("vendor", "raise RuntimeError('\\x1b[2J[bold]x[/nope]')")
    found = document(run("--json"), 1)
    assert "vendor" in found["sections"][0]["findings"][-1]["name"]
    result = run()
    assert result.exit_code == 1
    assert "[bold]x[/nope]" in result.stdout
    assert "\x1b" not in result.stdout


def test_nobody_there() -> None:
    assert document(run("--json", "--peer=http://127.0.0.1:1"), 2)
    assert document(run("--json", "--peer-host=127.0.0.1:1"), 2)


def test_two_doctors() -> None:
    with listening() as other:
        found = document(run("--json", f"--peer-host={other.address}"), 0)
        assert other.result()[0] == 0
    assert sections(found)[-1] == f"link to {other.address}"


def test_an_address_that_is_taken() -> None:
    with listening() as other:
        taken = Listening("--listen", other.address)
        try:
            code, told = taken.result()
        finally:
            taken.end()
    assert code == 2
    assert "cannot listen" in told["sections"][0]["findings"][0]["reason"]["message"]


def test_until_it_is_interrupted() -> None:
    """For people at the terminal: Ctrl-C ends it, and what was tried so far is told."""
    with listening() as once:
        once.end()
    made = Listening("--config", "there.toml", "--listen", "127.0.0.1:0", "--size", "1")
    try:
        address = made.wait()
        for _ in range(2):
            assert run(f"--peer-host={address}").exit_code == 0
            made.came()
        made.process.send_signal(2)
        code, told = made.result()
    finally:
        made.end()
    assert code == 0
    assert len(sections(told)) == 2


def test_nobody_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deeplink.cli.doctor.LISTEN_SECONDS", 0.2)
    found = document(run("--json", "--listen", "127.0.0.1:0"), 2)
    assert found["sections"][0]["findings"][0]["text"] == "no doctor of another host came"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--listen", "--peer=a"),
        ("--listen", "--peer-host=h"),
        ("--once",),
        ("--size=0",),
        ("--size=5000",),
        ("--seconds=0",),
    ],
)
def test_what_does_not_go_together(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, ["doctor", *arguments])
    assert result.exit_code == 2
    assert "Usage" in result.stderr


NOISY = """
import os
from deeplink import hookimpl

@hookimpl
def deeplink_register_transports(register):
    os.write(1, b"a library says hello\\n")
"""


def test_what_libraries_print_is_not_in_the_document(install: Callable[[str, str], None]) -> None:
    install("vendor", NOISY)
    program = f"import sys; sys.path[:] = {sys.path!r}; from deeplink.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "doctor", "--json", *FAST], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["exit_code"] == 0
    assert "a library says hello" in done.stderr
