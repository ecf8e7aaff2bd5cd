"""TLS between engines: who is let in, what is said to whoever is not, and a socket that two threads use."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from certificates import Authority
from sockets import InThread, dial, drain, eventually, soon

from deeplink.errors import ConfigError, DeadlineExceeded, DeeplinkError, PeerGone, ProtocolError, Refused
from deeplink.kvconnector.handoffs.channel import Ask, Channel, Claim, Quit
from deeplink.kvconnector.transport.base import Push
from deeplink.kvconnector.transport.tcp import TcpTransport
from deeplink.kvconnector.wires import greeting, tls, wire
from deeplink.kvconnector.wires import listener as listening
from deeplink.kvconnector.wires.listener import Listener
from deeplink.kvconnector.wires.tls import Tls, TlsSocket

SECRET = b"a secret for tests only, 32 byte"
Side = tuple[Tls | None, bytes]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "theirs")


@pytest.fixture(scope="module")
def a(authority: Authority) -> Tls:
    return authority.tls("a")


@pytest.fixture(scope="module")
def b(authority: Authority) -> Tls:
    return authority.tls("b")


def meet(client: Side, server: Side) -> list[object]:
    """What becomes of a client and a server, over real TCP: the error of each, or its socket."""
    with socket.create_server(("127.0.0.1", 0)) as accepting:
        ends = [socket.create_connection(accepting.getsockname()), accepting.accept()[0]]

    def side(sock: socket.socket, mine: Side, server: bool) -> object:
        try:
            return greeting.greet(sock, mine[1], "test", server=server, deadline=soon(5), tls=mine[0])
        except DeeplinkError as exc:
            sock.close()
            return exc

    threads = [
        InThread(lambda end=end, mine=mine, server=server: side(end, mine, server))  # type: ignore[misc]
        for end, mine, server in zip(ends, (client, server), (False, True), strict=True)
    ]
    return [thread.join() for thread in threads]


@pytest.fixture
def pair(a: Tls, b: Tls) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    client, server = meet((a, SECRET), (b, SECRET))
    assert isinstance(client, TlsSocket)
    assert isinstance(server, TlsSocket)
    yield client, server
    client.close()
    server.close()


def refusals(client: Side, server: Side) -> list[Refused]:
    began = time.monotonic()
    results = meet(client, server)
    assert time.monotonic() - began < 3
    for result in results:
        assert isinstance(result, Refused), result
    return results  # type: ignore[return-value]


def test_both_have_it(pair: tuple[TlsSocket, TlsSocket]) -> None:
    client, server = pair
    assert client.version() == server.version() == "TLSv1.3"
    wire.send_all(client, [b"", b"abc", b"", b"def"], soon())
    assert wire.receive(server, 6, soon()) == b"abcdef"


@pytest.mark.parametrize("turned", [False, True])
def test_only_one_side_has_it(a: Tls, turned: bool) -> None:
    sides: list[Side] = [(a, SECRET), (None, SECRET)]
    ours, theirs = refusals(*(sides[::-1] if turned else sides))
    if turned:
        ours, theirs = theirs, ours
    assert (ours.field, ours.ours, ours.theirs) == ("kv.tls", "on", "off")
    assert (theirs.field, theirs.ours, theirs.theirs) == ("kv.tls", "off", "on")
    assert "[kv.tls]" in ours.remedy


@pytest.mark.parametrize("turned", [False, True])
def test_a_certificate_of_another_ca(a: Tls, authority: Authority, stranger: Authority, turned: bool) -> None:
    """Which trusts us, so that one side alone refuses."""
    sides: list[Side] = [(a, SECRET), (stranger.tls("x", trusting=authority), SECRET)]
    results = refusals(*(sides[::-1] if turned else sides))
    assert sorted(result.field for result in results) == ["kv.tls.ca", "kv.tls.certificate"]
    ours, theirs = results[::-1] if turned else results
    assert (ours.field, ours.ours) == ("kv.tls.ca", str(authority.certificate))
    assert theirs.ours.endswith("x.pem")
    assert "UNKNOWN_CA" in theirs.theirs


def test_two_cas_that_do_not_know_each_other(a: Tls, stranger: Authority) -> None:
    refusals((a, SECRET), (stranger.tls("y"), SECRET))


def test_a_certificate_does_not_replace_the_secret(a: Tls, b: Tls) -> None:
    for result in refusals((a, SECRET), (b, SECRET + b"x")):
        assert result.field == "secret"


def test_another_protocol(a: Tls) -> None:
    ends = socket.socketpair()
    waiting = InThread(lambda: greeting.greet(ends[0], SECRET, "test", server=True, deadline=soon(), tls=a))
    ends[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ProtocolError, match="does not speak"):
        waiting.join()
    for end in ends:
        end.close()


@pytest.mark.parametrize("server", [True, False])
@pytest.mark.parametrize("garbage", [b"", b"\0" * 64, b"\x16\x03\x01\xff\xff" + b"x" * 100, os.urandom(500)])
def test_garbage_in_place_of_a_handshake(a: Tls, server: bool, garbage: bytes) -> None:
    ends = socket.socketpair()
    waiting = InThread(lambda: greeting.greet(ends[0], SECRET, "test", server=server, deadline=soon(2), tls=a))
    ends[1].sendall(tls.MAGIC + garbage)
    ends[1].shutdown(socket.SHUT_WR)
    with pytest.raises((Refused, PeerGone)):
        waiting.join()
    for end in ends:
        end.close()


@pytest.mark.parametrize("server", [True, False])
def test_a_handshake_has_the_deadline(a: Tls, server: bool) -> None:
    ends = socket.socketpair()
    waiting = InThread(lambda: greeting.greet(ends[0], SECRET, "test", server=server, deadline=soon(0.3), tls=a))
    ends[1].sendall(tls.MAGIC)
    with pytest.raises(DeadlineExceeded):
        waiting.join(5)
    assert ends[0].fileno() == -1
    ends[1].close()


def test_it_is_read_and_written_at_once(pair: tuple[TlsSocket, TlsSocket]) -> None:
    """OpenSSL forbids that on one connection; a channel does it."""
    data = os.urandom(8 << 20)

    def receive(sock: socket.socket) -> bool:
        return wire.receive(sock, len(data), soon(30)) == data

    calls = [InThread(lambda sock=sock: wire.send(sock, data, soon(30))) for sock in pair]  # type: ignore[misc]
    calls += [InThread(lambda sock=sock: receive(sock)) for sock in pair]  # type: ignore[misc]
    assert [call.join(40) for call in calls] == [None, None, True, True]


def test_what_openssl_holds_is_readable(pair: tuple[TlsSocket, TlsSocket]) -> None:
    client, server = pair
    assert not wire.readable(client, 0.05)
    wire.send(server, b"ab", soon())
    assert wire.receive(client, 1, soon()) == b"a"
    assert wire.readable(client, 0)
    assert wire.receive(client, 1, soon()) == b"b"
    assert not wire.readable(client, 0)


def test_a_socket_shut_by_another_thread_gives_nothing_encrypted(pair: tuple[TlsSocket, TlsSocket]) -> None:
    client, server = pair
    wire.send(server, b"secret " * 1000, soon())
    eventually(lambda: wire.readable(client, 0))
    client.shutdown(socket.SHUT_RDWR)
    with pytest.raises(PeerGone):
        wire.send(client, b"never in the clear", soon())
    assert wire.receive(client, 7, soon()) == b"secret "


@pytest.mark.parametrize("cut", ["close", "reset"])
def test_a_peer_that_is_gone(pair: tuple[TlsSocket, TlsSocket], cut: str) -> None:
    client, server = pair
    if cut == "reset":
        server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    server.close()
    with pytest.raises(PeerGone):
        wire.receive(client, 1, soon())


def test_a_listener_and_a_channel(a: Tls, b: Tls) -> None:
    """Both directions at once, and `close` breaks it."""
    said: list[object] = []

    def serve(sock: socket.socket) -> None:
        channel = Channel(sock)
        said.append(channel.receive(soon()))
        channel.send(Ask("x" * 100), soon())
        channel.receive(soon(60))

    listener = Listener("127.0.0.1", SECRET, "channel", serve, a)
    channel = Channel.connect(listener.address, SECRET, soon(), b)
    claim = Claim("t" * 4000, b"c", b"p", (), "tcp", "address")
    channel.send(claim, soon())
    assert channel.receive(soon()) == Ask("x" * 100)
    assert said == [claim]
    assert not channel.readable(0.05)
    listener.close()
    with pytest.raises(PeerGone):
        channel.receive(soon())
    channel.close()
    with pytest.raises(PeerGone):
        channel.send(Quit(Refused("x").reason()), soon())
    eventually(lambda: not listener._open)


def test_a_listener_and_clients_without(a: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "GREETING_SECONDS", 0.3)
    listener = Listener("127.0.0.1", SECRET, "channel", lambda sock: None, a)
    with pytest.raises(Refused, match=r"kv\.tls"):
        Channel.connect(listener.address, SECRET, soon())
    with dial(listener.address) as sock:
        assert drain(sock) == tls.MAGIC
    eventually(lambda: not listener._open)
    listener.close()


@pytest.mark.parametrize("streams", [1, 3])
def test_pushes(a: Tls, b: Tls, streams: int) -> None:
    """Also close from another thread while a push is under way."""
    here, there = TcpTransport("127.0.0.1", SECRET, tls=a, streams=streams), TcpTransport("127.0.0.1", SECRET, tls=b)
    source, target = os.urandom(5_000_001), bytearray(5_000_001)
    region = there.register(memoryview(target))
    link = here.connect(there.address, soon())
    pushes = [Push(memoryview(source)[i : i + 70_001], region.key, i) for i in range(0, len(source), 70_001)]
    link.push(pushes, soon(20))
    assert target == source
    with pytest.raises(Refused):
        link.push([Push(memoryview(b"x"), bytes(16), 0)], soon())
    link.close()
    with pytest.raises(Refused, match=r"kv\.tls"):
        TcpTransport("127.0.0.1", SECRET).connect(there.address, soon())
    region.withdraw()
    here.close()
    there.close()


def test_withdraw_interrupts_a_writer(a: Tls, b: Tls) -> None:
    here, there = TcpTransport("127.0.0.1", SECRET, tls=a), TcpTransport("127.0.0.1", SECRET, tls=b)
    target = bytearray(1 << 20)
    region = there.register(memoryview(target))
    link = here.connect(there.address, soon())
    stop = threading.Event()

    def storm() -> None:
        while not stop.is_set():
            link.push([Push(memoryview(b"x" * (1 << 20)), region.key, 0)], soon(20))

    pushing = InThread(storm)
    eventually(lambda: target[0])
    region.withdraw()
    target[:] = bytes(1 << 20)
    with pytest.raises((PeerGone, Refused)):
        pushing.join()
    assert not any(target)
    link.close()
    here.close()
    there.close()


def change(what: str, to: Callable[[Path], object]) -> Callable[[dict[str, Path], Path], None]:
    def apply(files: dict[str, Path], folder: Path) -> None:
        files[what] = folder / "other"
        to(files[what])

    return apply


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("certificate", change("certificate", lambda path: None)),
        ("key", change("key", lambda path: path.mkdir())),
        ("ca", change("ca", lambda path: None)),
        ("certificate", change("certificate", lambda path: path.write_text("nothing"))),
        ("certificate", change("key", lambda path: path.write_text(""))),
        ("ca", change("ca", lambda path: path.write_text("nothing"))),
    ],
)
def test_files_that_cannot_be_used(
    authority: Authority, tmp_path: Path, field: str, spoil: Callable[[dict[str, Path], Path], None]
) -> None:
    files = dict(zip(("certificate", "key"), authority.issue("c"), strict=True)) | {"ca": authority.certificate}
    spoil(files, tmp_path)
    with pytest.raises(ConfigError) as caught:
        Tls.load(files["certificate"], files["key"], files["ca"])
    assert caught.value.field == f"kv.tls.{field}"


def test_a_key_of_another_certificate_or_an_encrypted_one(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("d")
    with pytest.raises(ConfigError, match="not a certificate and its unencrypted key"):
        Tls.load(certificate, authority.issue("e")[1], authority.certificate)
    locked = tmp_path / "locked.key"
    command = f"openssl ec -in {key} -aes256 -passout pass:word -out {locked}"
    assert os.system(f"{command} 2>/dev/null") == 0
    with pytest.raises(ConfigError, match="encrypted"):
        Tls.load(certificate, locked, authority.certificate)
