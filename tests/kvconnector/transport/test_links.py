"""tcp over emulated links: a long one that loses packets, and one that is cut in mid-transfer."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack

import netlink
import pytest
from sockets import InThread, eventually, soon

from deeplink.errors import DeadlineExceeded
from deeplink.kvconnector.transport.base import Push
from deeplink.kvconnector.transport.tcp import TcpLink, TcpTransport

SECRET = b"a secret for tests only, 32 byte"
SIZE = 16 << 20
OUTAGE = 2.0


class Ends:
    """A transport in either namespace, both in this process, and a link between them."""

    def __init__(self, net: netlink.Net, streams: int) -> None:
        with net.b.entered():
            self.there = TcpTransport(net.b.address, SECRET)
        with net.a.entered():
            self.here = TcpTransport(net.a.address, SECRET, streams=streams)
            self.link: TcpLink = self.here.connect(self.there.address, soon(20))
        self.target = bytearray(SIZE)
        self.region = self.there.register(memoryview(self.target))

    def pushes(self, source: bytes) -> list[Push]:
        return [Push(memoryview(source)[i : i + 100_000], self.region.key, i) for i in range(0, len(source), 100_000)]

    def close(self) -> None:
        self.link.close()
        self.here.close()
        self.there.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def ends(stack: ExitStack, line: netlink.Line, streams: int = 1) -> tuple[netlink.Net, Ends]:
    try:
        net = stack.enter_context(netlink.between(line))
    except netlink.Unavailable as exc:
        pytest.skip(f"no link can be emulated here: {exc}")
    made = Ends(net, streams)
    stack.callback(made.close)
    return net, made


@pytest.mark.parametrize("streams", [1, 4])
def test_a_long_link_that_loses_packets(stack: ExitStack, streams: int) -> None:
    _, pair = ends(stack, netlink.Line(200, delay_ms=10, loss=0.01), streams)
    source = secrets.token_bytes(SIZE)
    pair.link.push(pair.pushes(source), soon(40))
    assert pair.target == source


@pytest.mark.parametrize("streams", [1, 4])
def test_a_link_that_is_cut_for_a_while(stack: ExitStack, streams: int) -> None:
    """The connections outlive it, and go on by themselves: the kernel tries again at growing intervals."""
    net, pair = ends(stack, netlink.Line(100, delay_ms=5), streams)
    source = secrets.token_bytes(SIZE)
    pushing = InThread(lambda: pair.link.push(pair.pushes(source), soon(40)))
    eventually(lambda: any(pair.target[SIZE // 4 : SIZE // 4 + 64]))
    net.cut(OUTAGE)
    began = time.monotonic()
    pushing.join(40)
    assert pair.target == source
    assert time.monotonic() - began > OUTAGE


def test_a_link_that_stays_cut_ends_by_the_deadline(stack: ExitStack) -> None:
    net, pair = ends(stack, netlink.Line(100, delay_ms=5))
    began = time.monotonic()
    pushing = InThread(lambda: pair.link.push(pair.pushes(secrets.token_bytes(SIZE)), began + 1.5))
    eventually(lambda: any(pair.target))
    net.cut(60.0)
    with pytest.raises(DeadlineExceeded):
        pushing.join()
    assert time.monotonic() - began < 3
    pair.region.withdraw()  # what holds the memory at the other end can be ended all the same
    assert time.monotonic() - began < 4


def test_nothing_is_left_of_a_network(stack: ExitStack) -> None:
    net, pair = ends(stack, netlink.Line(1000))
    pair.link.push(pair.pushes(b"x" * 1000), soon())
    assert pair.target.startswith(b"x" * 1000)
    assert net.a.descriptor != net.b.descriptor
    with net.a.entered():
        inside = netlink.identity()
    assert inside != netlink.identity()
    stack.close()
    held = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            held.append(os.readlink(f"/proc/self/fd/{name}"))
    assert f"net:[{inside}]" not in held
