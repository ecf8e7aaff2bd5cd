"""Two doctors in two processes: what they try, and how it ends when one of them is not what it should be."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from certificates import Authority
from looking import BASE, SECRET, by_name, listening, look
from plugin_path import transport

from deeplink.doctor import exchange, kit, link, trial
from deeplink.doctor.answering import Answering
from deeplink.doctor.exchange import Done, Give, Hello, Kit, Meeting, Message, Problem, Sent, Take, Taking, Took
from deeplink.doctor.model import diagnose
from deeplink.doctor.subject import Effort
from deeplink.errors import ConfigError, DeadlineExceeded, DeeplinkError, PeerGone, Reason
from deeplink.kvconnector.wires import greeting, wire
from deeplink.kvconnector.wires.listener import Listener
from deeplink.plugins import DISABLE, ONLY

Install = Callable[[str, str], None]


def deadline() -> float:
    return time.monotonic() + 20


# -- all is well -----------------------------------------------------------------------------------------------


def test_two_doctors() -> None:
    with listening() as other:
        section = link.examine(look(), other.address)
        code, told = other.result()
    assert diagnose([section]).exit_code == 0
    assert section.name == f"link to {other.address}"
    found = by_name(section)
    assert found["peer"].facts["host"] == socket.gethostname()
    assert found["peer"].facts["address"] == "127.0.0.1"
    for name in ("shm", "tcp"):
        assert found[name].standing == "works", found[name]
        assert found[name].facts["peer_address"] != found[name].facts["address"]
        assert [one["bytes"] for one in found[name].facts["trials"]] == [1 << 20] * 2
    assert found["nixl"].standing == "off"
    # The one that listened says the same.
    assert code == 0
    (mirror,) = told["sections"]
    assert mirror["name"] == f"link from {socket.gethostname()}"
    theirs = {one["name"]: one for one in mirror["findings"]}
    assert theirs["tcp"]["standing"] == "works"
    assert [one["gb_per_second"] for one in theirs["tcp"]["facts"]["trials"]] == [
        one["gb_per_second"] for one in found["tcp"].facts["trials"]
    ]


def test_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    texts = []
    for name in ("here", "there"):
        certificate, key = authority.issue(name)
        texts.append(f'{BASE}[kv.tls]\ncertificate = "{certificate}"\nkey = "{key}"\nca = "{authority.certificate}"\n')
    with listening(texts[1]) as other:
        found = by_name(link.examine(look(texts[0]), other.address))
        assert found["tcp"].standing == "works"
        assert other.result()[0] == 0
    with listening(texts[1]) as other:
        section = link.examine(look(), other.address)
        reason = by_name(section)["peer"].reason
        assert reason is not None
        assert (reason.field, reason.ours, reason.theirs) == ("kv.tls", "off", "on")
        assert diagnose([section]).exit_code == 1


def test_each_has_what_the_other_lacks(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("vendor", transport(""))
    with monkeypatch.context() as there:
        there.setenv(DISABLE, "vendor")
        with listening() as other:
            there.setenv(DISABLE, "shm")
            section = link.examine(look(), other.address)
            code, told = other.result()
    found = by_name(section)
    assert found["tcp"].standing == "works"
    for name, ours, theirs in (("other", "on", "not there"), ("shm", "not there", "on")):
        reason = found[name].reason
        assert reason is not None
        assert (found[name].standing, reason.ours, reason.theirs) == ("off", ours, theirs)
        assert reason.remedy == "install it on both hosts"
    assert (diagnose([section]).exit_code, code) == (0, 0)
    assert {one["name"]: one["standing"] for one in told["sections"][0]["findings"]}["other"] == "off"


def test_nothing_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ONLY, "tcp")
    with listening() as other:
        monkeypatch.setenv(ONLY, "shm")
        section = link.examine(look(), other.address)
        code, _ = other.result()
    reason = by_name(section)["all"].reason
    assert reason is not None
    assert (reason.field, reason.ours, reason.theirs) == ("transports", "shm", "tcp")
    assert (diagnose([section]).exit_code, code) == (1, 1)


# -- all is not well -------------------------------------------------------------------------------------------


def test_another_secret(home: Path) -> None:
    (home / "secret2").write_bytes(b"another secret of 32 bytes, more")
    with listening('secret_file = "secret2"\n') as other:
        section = link.examine(look(), other.address)
    (found,) = section.findings
    assert found.standing == "failed"
    assert found.reason is not None
    assert found.reason.field == "secret"
    assert "secret_file" in found.reason.remedy
    assert diagnose([section]).exit_code == 1


@pytest.mark.parametrize("peer", ["127.0.0.1:1", "127.0.0.1:x", "a..b:1", "[::1]:1", ":", "127.0.0.1:0"])
def test_nobody_there(peer: str) -> None:
    section = link.examine(look(), peer)
    (found,) = section.findings
    assert found.standing == "unknown"
    assert found.reason is not None
    if found.reason.code == "peer_gone":
        assert "deeplink doctor --listen" in found.reason.remedy
    assert diagnose([section]).exit_code == 2


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"DLK1" + bytes(200)])
def test_something_else_answers(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            sock, _ = server.accept()
            with sock, contextlib.suppress(OSError):
                sock.sendall(said)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass

        threading.Thread(target=answer, daemon=True).start()
        (found,) = link.examine(look(), f"127.0.0.1:{server.getsockname()[1]}").findings
    assert found.standing in ("unknown", "failed")


def test_one_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        (found,) = link.examine(look(), f"127.0.0.1:{server.getsockname()[1]}").findings
    assert found.standing == "unknown"
    assert found.reason is not None
    assert found.reason.code == "deadline_exceeded"


def test_a_transport_that_breaks_on_the_other_side(install: Install) -> None:
    """The reason comes over, with whose it is."""
    install(
        "vendor",
        transport("""
        def connect(self, address, deadline):
            import sys
            if "doctor" in sys.argv:
                raise RuntimeError("no route on this NIC")
            return super().connect(address, deadline)
        """),
    )
    with listening() as other:
        section = link.examine(look(), other.address)
        code, told = other.result()
    found = by_name(section)["other"]
    assert found.standing == "failed"
    assert found.text.startswith("the self-test: ")
    assert found.text.endswith(" GB/s there, failed back")
    assert found.reason is not None
    assert found.reason.message == "at the other end: no route on this NIC"
    assert by_name(section)["tcp"].standing == "works"
    assert (diagnose([section]).exit_code, code) == (1, 1)
    (mirror,) = [one for one in told["sections"][0]["findings"] if one["name"] == "other"]
    assert (mirror["standing"], mirror["reason"]["message"]) == ("failed", "no route on this NIC")


DIES = """
def register(self, memory):
    import os, sys
    if "doctor" in sys.argv:
        os.kill(os.getpid(), {signal})
    return super().register(memory)
"""


def test_a_peer_that_is_killed(install: Install) -> None:
    install("vendor", transport(DIES.format(signal=int(signal.SIGKILL))))
    with listening() as other:
        section = link.examine(look(), other.address)
    found = by_name(section)
    assert {name: found[name].standing for name in ("shm", "other", "tcp")} == {
        "shm": "works",
        "other": "failed",
        "tcp": "unknown",
    }
    assert found["other"].reason is not None
    assert found["other"].reason.code == "peer_gone"
    assert diagnose([section]).exit_code == 1


def test_a_peer_that_freezes(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deeplink.doctor.calling.ANSWER_SECONDS", 1.0)
    install("vendor", transport(DIES.format(signal=int(signal.SIGSTOP))))
    with listening() as other:
        begin = time.monotonic()
        found = by_name(link.examine(look(seconds=1.0), other.address))
        assert time.monotonic() - begin < 30
    assert found["other"].standing == "failed"
    assert found["other"].reason is not None
    assert found["other"].reason.code == "deadline_exceeded"


def test_a_caller_that_is_gone() -> None:
    """The doctor that listens says so, and of what, and ends."""
    with listening() as other:
        with contextlib.closing(greeted(other.address)) as sock:
            exchange.send(sock, hello(transports=TCP))
            exchange.receive(sock, 20)
            exchange.send(sock, Take("tcp", 10))
            exchange.receive(sock, 20)
        code, told = other.result()
    assert code == 1
    found = {one["name"]: one for one in told["sections"][0]["findings"]}
    assert found["peer"]["standing"] == "works"
    assert (found["tcp"]["standing"], found["tcp"]["reason"]["code"]) == ("failed", "peer_gone")
    assert found["tcp"]["text"] == "the self-test broke off"


def test_the_address_cannot_be_had() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match="cannot listen") as caught,
        link.listening(look(), f"127.0.0.1:{taken.getsockname()[1]}"),
    ):
        pass
    assert "--listen HOST:PORT" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "host", "found"),
    [
        ("h", "", ("h", 8990)),
        ("h:1", "", ("h", 1)),
        (":1", "k", ("k", 1)),
        ("", "k", ("k", 8990)),
        ("::1", "", ("::1", 8990)),
        ("[::1]", "", ("::1", 8990)),
        ("[::1]:7", "", ("::1", 7)),
    ],
)
def test_addresses(text: str, host: str, found: tuple[str, int]) -> None:
    assert link.split(text, host) == found


@pytest.mark.parametrize("text", ["", ":1", "h:", "h:x", "h:65536", "h:-1"])
def test_no_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST"):
        link.split(text)


@pytest.mark.parametrize(
    ("address", "here", "there", "refused"),
    [
        ("127.0.0.1:5", "10.0.0.1", "10.0.0.2", True),
        ("[::1]:5", "10.0.0.1", "10.0.0.2", True),
        ("0.0.0.0:5", "10.0.0.1", "10.0.0.2", True),
        ("localhost:5", "10.0.0.1", "10.0.0.2", True),
        ("10.0.0.2:5", "10.0.0.1", "10.0.0.2", False),
        ("fabric-2:5", "10.0.0.1", "10.0.0.2", False),
        ("127.0.0.1:5", "10.0.0.1", "10.0.0.1", False),
        ("127.0.0.1:5", "127.0.0.1", "127.0.0.2", False),
        ("local:boot.1/name", "10.0.0.1", "10.0.0.2", False),
    ],
)
def test_an_address_that_means_this_host(address: str, here: str, there: str, refused: bool) -> None:
    """The default of kv.host, on two hosts: whoever dials it would reach itself."""
    found = trial.out_of_reach(address, here, there)
    assert (found is not None) is refused
    if found is not None:
        assert (found.field, found.ours) == ("kv.host", f"reached it at {there}")
        assert found.remedy.endswith(there)


# -- callers that are not doctors ------------------------------------------------------------------------------


def hello(**fields: object) -> Hello:
    made = Hello(exchange.VERSION, "0", "h", 1 << 20, 5.0, {}, {})
    return msgspec.structs.replace(made, **fields)


def greeted(address: str) -> socket.socket:
    return greeting.greet(
        wire.connect(address, deadline()), SECRET, exchange.PURPOSE, server=False, deadline=deadline()
    )


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Kit, list[Meeting]]]:
    """In this process: where it listens, its kit, and the meetings it has had."""
    monkeypatch.setenv(ONLY, "tcp")
    subject = look()
    config, plugins = link.usable(subject)
    meetings: list[Meeting] = []
    with kit.started(config, plugins, SECRET, Effort(1 << 20, 2.0)) as ours:
        listener = Listener("127.0.0.1", SECRET, exchange.PURPOSE, Answering(ours, meetings.append).serve)
        yield listener.address, ours, meetings
        listener.close()


TCP = {"tcp": "127.0.0.1:1"}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([hello(version=9)], "different versions"),
        ([Sent()], "Sent out of turn"),
        ([hello(), Sent()], "Sent out of turn"),
        ([hello(), Take("tcp", 10)], "not in common"),
        ([hello(transports=TCP), Take("nixl", 10)], "not in common"),
        ([hello(transports={"tcp": "local:x/y"}), Take("tcp", 10)], "not in common"),
        ([hello(transports=TCP), Take("tcp", (1 << 20) + 1)], "more than was agreed"),
        ([hello(transports=TCP), Give("tcp", b"k", 1 << 39)], "more than was agreed"),
        ([hello(transports=TCP, size=5), Take("tcp", 6)], "more than was agreed"),
        ([hello(transports=TCP), Took("x")], "Took out of turn"),
        ([hello(transports=TCP), Take("tcp", 10), hello()], "Hello out of turn"),
    ],
)
def test_what_it_refuses(answering: tuple[str, Kit, list[Meeting]], messages: list[Message], said: str) -> None:
    address, _, _ = answering
    with contextlib.closing(greeted(address)) as sock:
        for message in messages:
            exchange.send(sock, message)
        while not isinstance(answer := exchange.receive(sock, 20), Problem):
            pass
        assert said in str(DeeplinkError.from_reason(answer.reason))
        with pytest.raises(PeerGone):
            exchange.receive(sock, 20)
    assert works(address)


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x93" * 1000, msgspec.msgpack.encode({"type": "hello"})])
def test_garbage(answering: tuple[str, Kit, list[Meeting]], frame: bytes) -> None:
    address, _, _ = answering
    for data in (struct.pack("<I", len(frame)) + frame, struct.pack("<I", 1 << 31)):
        with contextlib.closing(greeted(address)) as sock:
            wire.send(sock, data, deadline())
            answer = exchange.receive(sock, 20)
            assert isinstance(answer, Problem)
            assert answer.reason.code == "protocol_error"
    assert works(address)


def test_where_a_push_goes_nowhere(answering: tuple[str, Kit, list[Meeting]]) -> None:
    address, _, _ = answering
    with contextlib.closing(greeted(address)) as sock:
        exchange.send(sock, hello(transports=TCP))
        exchange.receive(sock, 20)
        exchange.send(sock, Give("tcp", b"no key of ours", 10))
        answer = exchange.receive(sock, 20)
        assert isinstance(answer, Problem)
        assert answer.reason.code == "peer_gone"
        exchange.send(sock, Take("tcp", 10))  # and it goes on
        assert isinstance(exchange.receive(sock, 20), Taking)
        exchange.send(sock, Sent())
        assert isinstance(exchange.receive(sock, 20), Took)
        exchange.send(sock, Done(()))


def test_one_at_a_time(answering: tuple[str, Kit, list[Meeting]]) -> None:
    address, _, _ = answering
    with contextlib.closing(greeted(address)) as first:
        exchange.send(first, hello())
        assert isinstance(exchange.receive(first, 20), Hello)
        with contextlib.closing(greeted(address)) as second:
            answer = exchange.receive(second, 20)
            assert isinstance(answer, Problem)
            assert answer.reason.remedy == "try again"
            found = by_name(link.examine(look(), address))["peer"]
            assert (found.standing, found.reason) == ("unknown", answer.reason)
    assert works(address)


def test_memory_that_a_frozen_peer_may_write_to_is_not_used_again(
    answering: tuple[str, Kit, list[Meeting]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, ours, meetings = answering

    class Stuck:
        key = b"k"

        def withdraw(self) -> None:
            raise DeadlineExceeded("it may write there yet")

    monkeypatch.setattr(ours.transports.running["tcp"], "register", lambda memory: Stuck())
    with contextlib.closing(greeted(address)) as sock:
        exchange.send(sock, hello(transports=TCP))
        exchange.receive(sock, 20)
        exchange.send(sock, Take("tcp", 10))
        assert isinstance(exchange.receive(sock, 20), Taking)
        exchange.send(sock, Sent())
        answer = exchange.receive(sock, 20)
        assert isinstance(answer, Problem)
    with contextlib.closing(greeted(address)) as sock:
        again = exchange.receive(sock, 20)
        assert isinstance(again, Problem)
        assert again.reason == answer.reason
    assert isinstance(meetings[0].broken, Reason)


def works(address: str) -> bool:
    """Whether a doctor is served there, once the one before it is gone."""
    end = deadline()
    while time.monotonic() < end:
        found = by_name(link.examine(look(), address))
        if found["peer"].reason is None or found["peer"].reason.remedy != "try again":
            return found["tcp"].standing == "works"
        time.sleep(0.02)
    return False
