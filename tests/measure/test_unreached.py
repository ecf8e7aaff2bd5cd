"""Whatever is at the other end, or is not: an error of one class, that says who failed, in what, and what to do."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_openai import Script, serving
from raw_server import MODELS, Say, http, saying, stream

from deeplink.cli import main
from deeplink.errors import LocalError
from deeplink.local import client
from deeplink.local.unreached import unreached
from deeplink.measure import engine, streams

SMALL = ("--prompts", "16", "--batches", "1", "--contexts", "16", "--repeats", "1")
DEEP = b"[" * 100_000
ALL_AT_ONCE = stream(b'{"choices": [{"text": "x", "token_ids": [7, 7, 7, 7, 7, 7, 7, 7, 7, 7]}]}')


def measure(url: str, *options: str) -> Result:
    result = CliRunner().invoke(main, ["measure", url, "--chip", "c", *SMALL, *options])
    # An exit that was meant; a traceback would be another exception.
    assert isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "GET_SECONDS", 0.3)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def test_nothing_listens() -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    result = measure(url)
    assert result.exit_code == 1
    assert f"local_error: {url}/v1/models cannot be reached: nothing listens there" in result.stderr
    assert "start it, or correct the address" in result.stderr


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "say",
    [
        Say(hold=True),
        Say(b"HTTP/1.1 200 OK\r\n", again=b"x-more: 1\r\n"),
        Say(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", again=b" "),
        Say(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", hold=True),
    ],
    ids=["says nothing", "headers without end", "a byte now and then", "stops in the middle"],
)
def test_who_does_not_get_to_an_end(say: Say) -> None:
    with saying({"/": say}) as url:
        result = measure(url)
    assert result.exit_code == 1
    assert f"{url}/v1/models did not answer within 0.3 s" in result.stderr


@pytest.mark.parametrize(
    ("say", "why"),
    [
        (Say(), "ended the connection before it had answered"),
        (Say(b"SSH-2.0-OpenSSH_9.6\r\n"), "does not answer as HTTP endpoints do"),
        (Say(b"\x00\xff" * 300), "does not answer as HTTP endpoints do"),
        (http(b"<html>no</html>", "404 Not Found", "text/html"), "answered 404: <html>no</html>; name the endpoint"),
        (http(b'{"error": "no"}', "401 Unauthorized"), "answered 401"),
        (http(b"<html></html>", kind="text/html"), "does not list models"),
        (http(b"\xff\xfe"), "does not list models"),
        (http(b"[]"), "does not list models"),
        (http(b'{"data": [{"id": 7}]}'), "does not list models"),
        (http(b'{"data": [{"id": "m", "max_model_len": 1e400}]}'), "does not list models"),
        (http(b'{"data": ' + DEEP), "does not list models"),
        (http(b'{"data": []}'), "lists no model"),
    ],
)
def test_who_is_no_engine(say: Say, why: str) -> None:
    with saying({"/": say}) as url:
        result = measure(url)
    assert result.exit_code == 1
    assert f"local_error: {url}/v1/models" in result.stderr
    assert why in result.stderr


@pytest.mark.parametrize(
    ("say", "why"),
    [
        (Say(), "ended the connection before it had answered"),
        (Say(b"nonsense\r\n\r\n"), "does not answer as HTTP endpoints do"),
        (http(b"", "401 Unauthorized"), "give the endpoint's key with --key-file"),
        (http(b"{}", "400 Bad Request"), "takes prompts of token ids"),
        (stream(b"<html>"), "what is no completion"),
        (stream(b"[1]"), "what is no completion"),
        (stream(b'{"choices": 3}'), "what is no completion"),
        (stream(b'{"choices": ["a"]}'), "what is no completion"),
        (stream(DEEP), "what is no completion"),
        (stream(b'{"choices": [{"text": "' + b"x" * streams.MAX_LINE + b'"}]}'), "an event of more than"),
        (stream(), "ended a stream after 0 tokens"),
        (stream(b'{"choices": [{"text": "x"}]}', done=False), "ended a stream after 1 token"),
        (ALL_AT_ONCE, "came at once"),
    ],
)
def test_who_lists_a_model_and_is_no_engine(say: Say, why: str) -> None:
    with saying({"/v1/models": http(MODELS), "/v1/completions": say}) as url:
        result = measure(url)
    assert result.exit_code == 1
    assert result.stderr.count("local_error: ") == 1
    assert why in result.stderr


@pytest.mark.parametrize("hold", [Say(hold=True), stream(b'{"choices": [{"text": "x"}]}', done=False, hold=True)])
def test_a_stream_that_stands_still(hold: Say) -> None:
    with saying({"/": hold}) as url, pytest.raises(LocalError, match=r"did not answer 2 requests within 0\.3 s"):
        streams.together(url, [streams.body("m", [1], 4)] * 2, seconds=0.3)


def test_connections_that_nobody_takes() -> None:
    """A host that drops packets looks like this: its kernel has no room for another connection."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        where = listener.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(where)
        try:
            with pytest.raises(LocalError, match=r"did not answer 1 request within 0\.3 s"):
                streams.together(f"http://127.0.0.1:{where[1]}", [streams.body("m", [1], 4)], seconds=0.3)
        finally:
            for one in waiting:
                one.close()


@pytest.mark.parametrize(
    "url", ["", "nowhere", "ftp://host", "http://", "http://[::1", "http://host:99999", "http://host:0"]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(LocalError, match="is not the URL of an endpoint") as raised:
        engine.served(url)
    assert raised.value.remedy


def test_a_name_that_nobody_has() -> None:
    exc = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert "its host's name is not known" in str(unreached("http://host.invalid", exc, 1.0))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"two\nlines", "schlüssel".encode()])
def test_a_key_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with serving(Script()) as url:
        result = measure(url, "--key-file", str(tmp_path / "key"))
    assert result.exit_code == 1
    assert "config_error" in result.stderr
    assert "key-file" in result.stderr


def test_where_it_cannot_write_is_known_before_it_measures(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    script = Script()
    with serving(script) as url:
        result = measure(url, "--out", str(tmp_path / "file" / "rates.csv"))
    assert result.exit_code == 1
    assert "file" in result.stderr
    assert not script.requests


def test_a_failure_leaves_no_empty_table(tmp_path: Path) -> None:
    measure(f"http://127.0.0.1:{closed_port()}", "--out", str(tmp_path / "rates.csv"))
    assert not list(tmp_path.iterdir())
