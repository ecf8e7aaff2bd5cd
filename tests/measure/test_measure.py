"""`deeplink measure` against an endpoint that answers at once: what it asks, and what it writes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_openai import Script, serving

from deeplink.cli import main
from deeplink.errors import LocalError
from deeplink.measure import engine, streams
from deeplink.solver.estimates import table

SMALL = ("--prompts", "16,32", "--batches", "1,2", "--contexts", "20", "--repeats", "2")


def run(url: str, *options: str) -> Result:
    return CliRunner().invoke(main, ["measure", url, *options])


def test_the_table_is_one_the_solver_reads(tmp_path: Path) -> None:
    script = Script()
    with serving(script) as url:
        result = run(f"{url}/", "--chip", "a chip", "--tp", "2", *SMALL, "--out", str(tmp_path / "rates.csv"))
    assert result.exit_code == 0, result.output
    rows = table.read(tmp_path / "rates.csv")
    counted = Counter((row.phase, row.requests, row.tokens) for row in rows)
    assert counted == {
        ("prefill", 1, 16): 2,
        ("prefill", 2, 16): 2,
        ("prefill", 1, 32): 2,
        ("prefill", 2, 32): 2,
        ("decode", 1, 1): 2,
        ("decode", 2, 1): 2,
    }
    assert {(row.chip, row.model, row.tp) for row in rows} == {("a chip", "served", 2)}
    assert all(row.seconds > 0 and "measure" in row.source and "served" in row.source for row in rows)
    # Repeats of a point are at one place, so that their spread is its error.
    assert len({(row.requests, row.context) for row in rows if row.phase == "decode"}) == 2


@pytest.mark.parametrize(
    ("owner", "options", "engine"),
    [
        (None, (), ""),
        ("sglang", (), "sglang"),
        ("a gateway", (), ""),
        (["vllm"], (), ""),
        ("vllm", ("--engine", "sglang"), "sglang"),
    ],
)
def test_the_table_says_which_engine_it_is_of(owner: Any, options: tuple[str, ...], engine: str) -> None:
    with serving(Script(owner=owner)) as url:
        result = run(url, "--chip", "c", "--prompts", "16", "--batches", "1", "--contexts", "20", *options)
    assert result.exit_code == 0, result.output
    rows = list(table.parse(result.stdout, "stdout"))
    assert {row.engine for row in rows} == {engine}
    assert ("engine" in result.stdout.splitlines()[0].split(",")) == bool(engine)


def test_no_two_prompts_that_are_prefilled_begin_alike() -> None:
    script = Script()
    with serving(script) as url:
        assert run(url, "--chip", "c", *SMALL).exit_code == 0
    first = [tuple(request["prompt"][:8]) for request in script.requests if request["max_tokens"] == 1]
    assert len(first) == len(set(first)) == 2 * (1 + 2) * 2
    assert {len(request["prompt"]) for request in script.requests} == {16, 20, 32}


def test_what_is_too_long_for_the_engine_is_left_out() -> None:
    with serving(Script(most=30)) as url:
        result = run(url, "--chip", "c", *SMALL)
    assert result.exit_code == 0
    assert "prefill of 32 tokens is left out: the engine takes 30" in result.stderr
    assert "decode at 20 tokens is left out" in result.stderr
    assert ",16,0.0," in result.stdout
    assert ",32,0.0," not in result.stdout


def test_several_tokens_an_event_and_engines_that_do_not_say_ids() -> None:
    with serving(Script(per_event=2)) as url:
        (found,) = streams.together(url, [streams.body("m", [1, 2], 6)])
        assert len(found.tokens) == 6
    with serving(Script(says_ids=False)) as url:
        (found,) = streams.together(url, [streams.body("m", [1, 2], 6)])
        assert len(found.tokens) == 6


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (Script(status=500), "answered 500"),
        (Script(error="out of memory"), "out of memory"),
        (Script(cut=True), "ended a stream"),
        (Script(most=None), ""),
    ],
)
def test_what_goes_wrong_is_told(script: Script, why: str) -> None:
    with serving(script) as url:
        result = run(url, "--chip", "c", *SMALL)
    assert result.exit_code == (1 if why else 0)
    assert why in result.stderr


def test_endpoints_that_are_none() -> None:
    for url, why in (("nowhere", "is not the URL"), ("http://127.0.0.1:1", "127.0.0.1:1")):
        with pytest.raises(LocalError, match=why):
            engine.served(url)


def test_a_key_is_sent(tmp_path: Path) -> None:
    key, script = tmp_path / "key", Script()
    key.write_text("a key of mine\n")
    with serving(script) as url:
        assert run(url, "--chip", "c", *SMALL, "--key-file", str(key)).exit_code == 0
    assert script.keys == {"Bearer a key of mine"}


def test_the_chip_has_to_be_said() -> None:
    assert "--chip" in run("http://127.0.0.1:1").output
    assert run("http://127.0.0.1:1", "--chip", "c", "--prompts", "1,x").exit_code == 2


def link(tmp_path: Path, script: Script) -> Result:
    (tmp_path / "secret").write_text("0123456789abcdef0123456789abcdef")
    with serving(script) as url:
        lines = [f'secret_file = "{tmp_path / "secret"}"']
        for name in ("p", "d"):
            lines += ["[[engines]]", f'name = "{name}"', f'url = "{url}"', f'control = "{url}"']
        (tmp_path / "deeplink.toml").write_text("\n".join(lines))
        return run(
            url, "--link", str(tmp_path / "deeplink.toml"), "--prompts", "16,64", "--repeats", "2", "--rest", "0"
        )


def handed_over(**more: Any) -> Script:
    headers = {"x-deeplink-prefill": "p", "x-deeplink-decode": "d", "x-deeplink-handoff": "h"}
    return Script(headers=headers, handoffs={"state": "loaded", "kv_bytes": 2_000_000, "milliseconds": 4.0}, **more)


def test_a_link_is_what_the_engines_say_of_their_handoffs(tmp_path: Path) -> None:
    result = link(tmp_path, handed_over())
    assert result.exit_code == 0, result.output
    assert '[[links]]\nfrom = "p"\nto = "d"\ngb_per_s = 0.5\nconvention = "one-way"' in result.stdout


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"state": "failed", "kv_bytes": 4096}, "was not loaded"),
        ({"state": "loaded"}, "was not loaded"),
        ({"kv_bytes": "many"}, "does not say what became of the handoff"),
        ([], "does not say what became of the handoff"),
    ],
)
def test_a_handoff_that_was_none_is_not_measured(tmp_path: Path, said: Any, why: str) -> None:
    script = handed_over()
    script.handoffs = said
    result = link(tmp_path, script)
    assert result.exit_code == 1
    assert "local_error: " in result.stderr
    assert why in result.stderr


def test_a_link_without_handoffs_cannot_be_measured(tmp_path: Path) -> None:
    result = link(tmp_path, Script())
    assert result.exit_code == 1
    assert "was not handed over" in result.stderr
