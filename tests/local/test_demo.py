"""`deeplink demo --once --json` against a stack that does one thing wrong: it exits 1 and names it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner, Result

from deeplink.cli import main
from deeplink.local import demo, measure
from deeplink.local.demo import Running
from tests.local.fake_stack import Script, fake_stack

Change = Callable[[Script], None]


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> Callable[[Script], Result]:
    monkeypatch.setattr(measure, "SETTLE_SECONDS", 0.2)

    def run(script: Script) -> Result:
        @contextmanager
        def running(*_: Any) -> Iterator[Running]:
            with fake_stack(script) as stack:
                yield Running(stack, ())

        monkeypatch.setattr(demo, "running", running)
        return CliRunner().invoke(main, ["demo", "--once", "--json"])

    return run


def test_all_well(once: Callable[[Script], Result]) -> None:
    script = Script()
    result = once(script)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["agreement"] == "exact"
    assert found["prefill"]["block_size"] == 64
    assert found["decode"]["block_size"] == 128
    assert len(found["requests"]) >= 4
    for request in found["requests"]:
        assert request["path"] == "handoff"
        assert request["tokens_equal"] is True
        assert request["digest"] == "0a" * 8
        assert request["ttft_ms"] > 0
    assert found["leaks"] == {"blocks": 0, "staging_bytes": 0, "claims": 0}
    assert len(set(script.salts)) == len(found["requests"])


WRONG: list[tuple[Change, str]] = [
    (lambda script: setattr(script, "path", "plain"), "chat: path: plain"),
    (lambda script: setattr(script, "external", 4), "chat: path: handoff of 4 instead of 9 tokens"),
    (lambda script: setattr(script, "tokens_alone", [9] * 64), "chat: tokens_equal"),
    (lambda script: script.digest.update(prefill="0b" * 8), "chat: digest: prefill 0b0b0b0b0b0b0b0b, decode 0a0a"),
    (lambda script: script.digest.update(prefill="", decode=""), "chat: digest: prefill none, decode none"),
    (lambda script: script.state.update(prefill="expired"), "chat: state: prefill expired, decode loaded"),
    (lambda script: script.state.update(decode="receiving"), "chat: state: prefill drained, decode receiving"),
    (lambda script: script.held.update(blocks=2), "leaks.blocks: 4 still held"),
    (lambda script: script.held.update(staging=10), "leaks.staging_bytes: 20 still held"),
    (lambda script: script.held.update(claims=1), "leaks.claims: 2 still held"),
]


@pytest.mark.parametrize(("change", "named"), WRONG, ids=[named for _, named in WRONG])
def test_a_failed_check_is_named(once: Callable[[Script], Result], change: Change, named: str) -> None:
    script = Script()
    change(script)
    result = once(script)
    assert result.exit_code == 1
    assert named in result.stderr
    assert "leaks" in json.loads(result.stdout.splitlines()[-1])


def test_both_wrong_in_the_same_way_is_not_equal(once: Callable[[Script], Result]) -> None:
    """An empty or short answer on both sides proves nothing."""
    result = once(Script(tokens=[], tokens_alone=[]))
    assert result.exit_code == 1
    assert "tokens_equal" in result.stderr


def test_an_engine_that_counts_nothing_itself(once: Callable[[Script], Result]) -> None:
    """It goes on from the whole prompt, by its connector's account, and of a chat says the text alone."""
    assert once(Script(counts=False)).exit_code == 0
    assert "chat: tokens_equal" in once(Script(counts=False, tokens_alone=[9] * 64)).stderr
    assert "chat: tokens_equal" in once(Script(counts=False, tokens=[1] * 63, tokens_alone=[1] * 63)).stderr
    result = once(Script(counts=False, loaded=4))
    assert result.exit_code == 1
    assert "chat: path: handoff of 4 instead of 10 tokens" in result.stderr


def test_a_stream_that_is_cut_off(once: Callable[[Script], Result]) -> None:
    result = once(Script(cut=True))
    assert result.exit_code == 1
    assert "IncompleteRead" in result.stderr


def test_an_error_inside_a_stream(once: Callable[[Script], Result]) -> None:
    result = once(Script(error="the peer is gone"))
    assert result.exit_code == 1
    assert "the peer is gone" in result.stderr


def test_engines_that_refuse_each_other(once: Callable[[Script], Result]) -> None:
    result = once(Script(weights={"prefill": "one", "decode": "another"}))
    assert result.exit_code == 1
    assert "model.weights" in result.stderr


def test_json_needs_once() -> None:
    result = CliRunner().invoke(main, ["demo", "--json"])
    assert result.exit_code == 2
    assert "--json needs --once" in result.stderr


def test_a_model_that_is_none(tmp_path: Any) -> None:
    result = CliRunner().invoke(main, ["demo", "--once", "--model", str(tmp_path)])
    assert result.exit_code == 1
    assert "config.json" in result.stderr


def test_each_engine_has_its_version_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[demo.Options] = []

    @contextmanager
    def running(options: demo.Options, *_: Any) -> Iterator[Running]:
        given.append(options)
        with fake_stack(Script()) as stack:
            yield Running(stack, ())

    monkeypatch.setattr(demo, "running", running)
    assert CliRunner().invoke(main, ["demo", "--once", "--prefill-version", "0.27.1"]).exit_code == 0
    assert (given[0].prefill_version, given[0].decode_version) == ("0.27.1", "0.32.0")
    refused = CliRunner().invoke(main, ["demo", "--once", "--prefill", "sglang", "--prefill-version", "0.32.0"])
    assert refused.exit_code == 2
    assert "0.32.0 of sglang is not one of 0.5.23" in " ".join(refused.output.split())
    refused = CliRunner().invoke(main, ["demo", "--once", "--decode-version", "0.28.0"])
    assert refused.exit_code == 2
    assert "0.29.0" in refused.output
