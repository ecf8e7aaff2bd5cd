"""`deeplink contract`: from a live control endpoint and from files, for people and for scripts."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from loopback import HND, SECRET, VEC, make_contract, make_group

from deeplink import config as configs
from deeplink.cli import main
from deeplink.kvconnector.contracts import contract as co
from deeplink.kvconnector.contracts.contract import Contract
from deeplink.kvconnector.control import Blocks, Control
from deeplink.local import client

replace = msgspec.structs.replace

PREFILL = make_contract("p", "prefill", make_group(VEC, 64), channel="127.0.0.1:1", tcp="127.0.0.1:2")
DECODE = make_contract("d", "decode", make_group(HND, 128), channel="127.0.0.1:3", tcp="127.0.0.1:4")
OTHER_WEIGHTS = replace(DECODE, model=replace(DECODE.model, weights="other"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and no configuration from outside."""
    monkeypatch.delenv(configs.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_bytes(SECRET)
    return tmp_path


@pytest.fixture
def serve() -> Iterator[Callable[[Contract], str]]:
    made: list[Control] = []

    def _serve(contract: Contract) -> str:
        made.append(Control(contract, SECRET, lambda: Blocks(1, 0)))
        return f"http://127.0.0.1:{made[-1].start('127.0.0.1', 0)}"

    yield _serve
    for control in made:
        control.close()


@pytest.fixture
def answer() -> Iterator[Callable[[int, bytes], str]]:
    """Makes an endpoint that is no control endpoint, and gives the same answer to everything."""
    made: list[http.server.ThreadingHTTPServer] = []

    def _answer(status: int, body: bytes) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        made.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=made[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{made[-1].server_port}"

    yield _answer
    for server in made:
        server.shutdown()
        server.server_close()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["contract", *arguments])


def config(**engines: str) -> str:
    """Writes a deeplink.toml with these engines' control URLs; the options to use it."""
    text = 'secret_file = "secret"\n'
    for name, url in engines.items():
        text += f'[[engines]]\nname = "{name}"\nurl = "http://127.0.0.1:1"\ncontrol = "{url}"\n'
    Path("deeplink.toml").write_text(text)
    return "--config=deeplink.toml"


def files(*contracts: Contract) -> list[str]:
    for index, contract in enumerate(contracts):
        Path(f"{index}.msgpack").write_bytes(co.encode(contract))
    return [f"{index}.msgpack" for index in range(len(contracts))]


def unreadable(result: Result, *said: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    for text in said:
        assert text in result.stderr


# -- where a contract is ---------------------------------------------------------------------------------------


def test_a_control_url(serve: Callable[[Contract], str]) -> None:
    url = serve(PREFILL)
    for given in (url, f"{url}/"):
        result = run("show", given, config(), "--json")
        assert result.exit_code == 0, result.output
        assert co.from_json(result.stdout_bytes) == PREFILL


def test_a_name_from_the_file(serve: Callable[[Contract], str], monkeypatch: pytest.MonkeyPatch) -> None:
    option = config(a=serve(PREFILL), b=serve(DECODE))
    assert co.from_json(run("show", "b", option, "--json").stdout_bytes) == DECODE
    monkeypatch.setenv(configs.VARIABLE, "deeplink.toml")
    assert co.from_json(run("show", "a", "--json").stdout_bytes) == PREFILL


@pytest.mark.parametrize(("suffix", "option"), [("", ()), ("", ("--api",)), ("/v1", ()), ("/v1/", ("--api",))])
def test_the_url_of_the_openai_endpoint(
    serve: Callable[[Contract], str],
    answer: Callable[[int, bytes], str],
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    option: tuple[str, ...],
) -> None:
    api = answer(404, b'{"detail":"Not Found"}')
    distance = int(serve(PREFILL).rpartition(":")[2]) - int(api.rpartition(":")[2])
    monkeypatch.setattr(configs, "control_port", lambda port: port + distance)
    result = run("show", api + suffix, config(), "--json", *option)
    assert result.exit_code == 0, result.output
    assert co.from_json(result.stdout_bytes) == PREFILL


def test_api_does_not_look_at_the_url_itself(serve: Callable[[Contract], str]) -> None:
    url = serve(PREFILL)
    unreadable(run("show", url, "--api", config()), configs.control_url(url))


@pytest.mark.parametrize("text", [co.encode(PREFILL), co.to_json(PREFILL), b"\n " + msgspec.json.encode(PREFILL)])
def test_a_file(home: Path, text: bytes) -> None:
    Path("engine").write_bytes(text)
    assert co.from_json(run("show", "engine", "--json").stdout_bytes) == PREFILL
    assert not (home / "state").exists()  # no secret is made for it


def test_what_show_prints_can_be_shown_again(serve: Callable[[Contract], str]) -> None:
    Path("kept.json").write_bytes(run("show", serve(PREFILL), config(), "--json").stdout_bytes)
    assert co.from_json(run("show", "kept.json", "--json").stdout_bytes) == PREFILL


def test_a_name_goes_before_a_file(serve: Callable[[Contract], str]) -> None:
    option = config(a=serve(PREFILL))
    Path("a").write_bytes(co.encode(DECODE))
    assert co.from_json(run("show", "a", option, "--json").stdout_bytes) == PREFILL
    assert co.from_json(run("show", "./a", option, "--json").stdout_bytes) == DECODE


# -- where it is not -------------------------------------------------------------------------------------------


def test_nothing_by_that_name() -> None:
    unreadable(run("show", "c", config(a="http://h:1", b="http://h:2")), "c: config_error", "known: a, b")
    unreadable(run("show", "127.0.0.1:8000"), "known: none")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 100,
        b"\xff" * 1000,
        b"PK\x03\x04",
        b"{}",
        b"{" * 100_000,
        b"\x92\x02\x80",
        b"[1, {}]",
        co.encode(PREFILL)[:-1],
        co.to_json(PREFILL)[:-1],
        co.to_json(PREFILL).replace(b'"epoch"', b'"epoche"'),
        bytes(20 << 20),
        b"{" + b" " * (20 << 20),
    ],
    ids=lambda data: f"{data[:12]!r}-{len(data)}",
)
def test_a_file_of_something_else(data: bytes) -> None:
    Path("garbage").write_bytes(data)
    unreadable(run("show", "garbage"), "garbage: protocol_error: ")
    good, *_ = files(PREFILL)
    for arguments in ((good, "garbage"), ("garbage", good)):
        unreadable(run("diff", *arguments, "--json"), "garbage: protocol_error: ")


def test_another_release() -> None:
    Path("later").write_bytes(msgspec.msgpack.encode((co.WIRE_VERSION + 1, {"x": 1})))
    unreadable(run("show", "later"), "later: contract_refused", "wire_version", "same deeplink release")


def test_no_file_at_all(home: Path) -> None:
    unreadable(run("show", str(home)), "config_error: cannot read the file")
    unreadable(run("show", "x" * 5000), "config_error: cannot read the file")
    unreadable(run("show", "a\x00b"), "config_error: cannot read the file")
    Path("closed").write_bytes(co.encode(PREFILL))
    Path("closed").chmod(0)
    if not os.access("closed", os.R_OK):
        unreadable(run("show", "closed"), "config_error: cannot read the file")


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "ftp://h:1",
        "http://h:0",
        "http://h:99999",
        "http://h:x",
        "http://[::1:80",
        "http://h/x",
        "http://u@h:1",
    ],
)
def test_not_a_url(url: str) -> None:
    unreadable(run("show", url, config()), f"{url}: config_error: not the URL of an engine")


@pytest.mark.parametrize("host", ["127.0.0.1:1", "a..b:1", f"{'x' * 70}.invalid:1", "a\x01b:1"])
def test_nobody_there(host: str) -> None:
    unreadable(run("show", f"http://{host}", config()), "local_error: ")


def test_another_secret(serve: Callable[[Contract], str]) -> None:
    Path("secret").write_bytes(b"another secret of 32 bytes, more")
    unreadable(run("show", "a", config(a=serve(PREFILL))), "a: local_error", "answered 401", "bearer token")


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, b"<html>", "not a contract"),
        (200, co.to_json(PREFILL), "not a contract"),
        (200, bytes(1 << 20), "more than 262144 bytes"),
        (500, b"\x1b[2J" * 100, "answered 500"),
    ],
)
def test_something_else_answers(answer: Callable[[int, bytes], str], status: int, body: bytes, said: str) -> None:
    result = run("show", "a", config(a=answer(status, body)))
    unreadable(result, "a: local_error", said)
    assert "\x1b" not in result.stderr


def test_https_is_not_spoken_in_the_clear(answer: Callable[[int, bytes], str]) -> None:
    url = answer(200, co.encode(PREFILL)).replace("http:", "https:")
    unreadable(run("show", "a", config(a=url)), "a: local_error", "over TLS")


def test_an_answer_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "GET_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            peer, _ = server.accept()
            with peer, contextlib.suppress(OSError):
                peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    peer.sendall(b".")
                    time.sleep(0.05)

        threading.Thread(target=drip, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        unreadable(run("show", "a", config(a=url)), "a: local_error", "did not answer within 0.5 s")


def test_both_places_are_named() -> None:
    unreadable(
        run("show", "http://127.0.0.1:1", config()), "http://127.0.0.1:1/v1/contract", "http://127.0.0.1:1001/v1/"
    )


def test_a_wrong_configuration() -> None:
    Path("deeplink.toml").write_text("roter = 1")
    unreadable(run("show", "a", "--config=deeplink.toml"), "config_error", "roter")
    unreadable(run("show", "a", "--config=gone.toml"), "config_error", "cannot read gone.toml")
    Path("secret").unlink()
    unreadable(run("show", "a", config(a="http://127.0.0.1:1")), "config_error", "secret file")


# -- what is printed -------------------------------------------------------------------------------------------


def test_show() -> None:
    result = run("show", *files(PREFILL))
    assert result.exit_code == 0
    for text in (
        "contract of test 0 on cpu",
        "prefill",
        "LlamaForCausalLM",
        VEC,
        "float32",
        "tcp 127.0.0.1:2",
        "epoch",
    ):
        assert text in result.stdout
    rows = {tuple(part.strip() for part in line.split("│")[1:3]) for line in result.stdout.splitlines()}
    assert {
        ("groups[0].block_size", "64"),
        ("groups[0].layers", "(0, 1, 2)"),
        ("ranks", "tp 1, pp 1, dp 1"),
        ("casts", "-"),
    } <= rows


def test_agreed() -> None:
    result = run("diff", *files(PREFILL, DECODE))
    assert result.exit_code == 0
    assert "0.msgpack -> 1.msgpack: exact over tcp" in result.stdout
    assert "1.msgpack -> 0.msgpack" not in result.stdout
    assert "groups[0].block_size" in result.stdout
    assert "informs only" in result.stdout
    assert "decides" not in result.stdout


def test_agreed_for_scripts() -> None:
    result = run("diff", *files(PREFILL, DECODE), "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["agreed"] is True
    assert found["directions"] == [
        {
            "producer": "0.msgpack",
            "consumer": "1.msgpack",
            "agreement": {
                "exact": True,
                "transport": "tcp",
                "wire": ["float32"],
                "casts": [],
                "takes": [[0]],
            },
            "refusal": None,
        }
    ]
    assert {"field": "groups[0].block_size", "ours": "64", "theirs": "128", "decides": False} in found["differences"]


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_a_file_whose_name_is_not_unicode(option: tuple[str, ...]) -> None:
    name = os.fsdecode(b"\xff")
    try:
        Path(name).write_bytes(co.encode(PREFILL))
    except OSError:
        pytest.skip("this file system has no such names")
    result = run("diff", name, *files(DECODE), *option)
    assert result.exit_code == 0, result.exception
    assert "\ufffd" in result.stdout


def test_refused() -> None:
    result = run("diff", *files(OTHER_WEIGHTS, PREFILL))
    assert result.exit_code == 1
    assert "1.msgpack -> 0.msgpack: refused by model.weights" in result.stdout
    for text in ("1.msgpack: w\n", "0.msgpack: other\n", "remedy: serve the same checkpoint on both engines"):
        assert text in result.stdout
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("│ model.weights")]
    assert [part.strip() for part in line.split("│")[1:-1]] == ["model.weights", "other", "w", "decides"]


def test_refused_for_scripts() -> None:
    result = run("diff", *files(PREFILL, OTHER_WEIGHTS), "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["agreed"] is False
    (direction,) = found["directions"]
    assert direction["agreement"] is None
    assert direction["refusal"] == {
        "field": "model.weights",
        "ours": "w",
        "theirs": "other",
        "remedy": "serve the same checkpoint on both engines",
    }
    assert [one["field"] for one in found["differences"] if one["decides"]] == ["model.weights"]


def test_both_ways() -> None:
    found = run("diff", *files(replace(PREFILL, role="both"), replace(DECODE, role="both")), "--json")
    assert [(one["producer"], one["consumer"]) for one in json.loads(found.stdout)["directions"]] == [
        ("0.msgpack", "1.msgpack"),
        ("1.msgpack", "0.msgpack"),
    ]


def test_two_of_one_role() -> None:
    result = run("diff", *files(PREFILL, replace(DECODE, role="prefill")))
    assert result.exit_code == 1
    assert "refused by role" in result.stdout


def test_an_engine_with_itself() -> None:
    both, *_ = files(replace(PREFILL, role="both"))
    result = run("diff", both, both)
    assert result.exit_code == 1
    assert "refused by epoch" in result.stdout
    assert "no field differs" in result.stdout


def test_two_live_engines_and_a_file(serve: Callable[[Contract], str]) -> None:
    option = config(a=serve(PREFILL), b=serve(DECODE))
    assert "a -> b: exact over tcp" in run("diff", "a", "b", option).stdout
    other, *_ = files(OTHER_WEIGHTS)
    assert run("diff", "a", other, option).exit_code == 1


def test_nothing_a_peer_says_steers_the_terminal() -> None:
    rude = replace(PREFILL, engine="\x1b[2J[bold]x[/nope]", chip="\x9b", model=replace(PREFILL.model, rope="\x1b]0;"))
    for arguments in (("show", *files(rude)), ("diff", *files(rude, DECODE))):
        result = run(*arguments)
        assert result.exit_code in (0, 1), result.exception
        assert "[bold]x[/nope]" in result.stdout
        assert not {"\x1b", "\x9b"} & set(result.stdout)
