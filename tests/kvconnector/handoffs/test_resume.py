"""A handoff goes on after a broken link, from what has landed; and what cannot go on ends by name."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from loopback import NHD, Gate, Meddling, Pair, read
from sockets import eventually
from world import Engine, Shape, hand_over

from deeplink.kvconnector.contracts.contract import CacheGroup
from deeplink.kvconnector.handoffs import offers as offers_module
from deeplink.kvconnector.handoffs import receive as receive_module
from deeplink.kvconnector.handoffs.serve import AHEAD
from deeplink.kvconnector.transport.base import Push
from deeplink.kvconnector.transport.tcp import TcpTransport
from deeplink.kvconnector.wires.listener import Listener

TOKENS = 333
OURS, THEIRS = [5, 2, 9, 0, 7, 11], [3, 1, 8]
CHUNK = 32 * 1536
Make = Callable[..., Pair]


def cut(listener: Listener) -> None:
    for sock in list(listener._open):
        with contextlib.suppress(OSError):  # it may have been closed meanwhile
            sock.shutdown(socket.SHUT_RDWR)


class Cutter:
    """Counts what is pushed, and cuts connections before the pushes that are named."""

    def __init__(self, pair: Pair, at: Sequence[int], *, channel: bool, link: bool) -> None:
        self.pushed = 0
        self._count = 0
        self._pair = pair
        self._at = set(at)
        self._cut = [
            listener
            for listener, wanted in (
                (pair.producer.endpoint._listener, channel),
                (pair.consumer.transport._listener, link),
            )
            if wanted
        ]

    def __call__(self, pushes: Sequence[Push]) -> Sequence[Push]:
        self._count += 1
        if self._count - 1 in self._at:
            for listener in self._cut:
                cut(listener)
        self.pushed += sum(push.source.nbytes for push in pushes)
        return pushes


def equal(pair: Pair) -> None:
    np.testing.assert_array_equal(
        read(pair.consumer.cache, THEIRS, 0, TOKENS), read(pair.producer.cache, OURS, 0, TOKENS)
    )


@pytest.mark.parametrize("at", [(0,), (3,), (10,), (1, 4, 9), tuple(range(0, 20, 3))])
@pytest.mark.parametrize(("channel", "link"), [(True, False), (False, True), (True, True)])
def test_a_cut_costs_only_what_was_under_way(pair: Pair, at: tuple[int, ...], channel: bool, link: bool) -> None:
    cutter = pair.producer.transport.meddle = Cutter(pair, at, channel=channel, link=link)
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    pair.pump(ticket)
    assert pair.outcome().reason is None
    equal(pair)
    sent, loaded = pair.settle(ticket, "drained", "loaded")
    assert sent is not None
    assert loaded is not None
    assert sent.digest == loaded.digest
    assert (sent.tokens, sent.kv_bytes) == (loaded.tokens, loaded.kv_bytes) == (TOKENS, TOKENS * 1536)
    assert (sent.resumed > 0) == (loaded.resumed > 0) == channel
    # For each cut, at most what was announced is sent again.
    assert cutter.pushed <= TOKENS * 1536 + len(at) * AHEAD * CHUNK


@pytest.mark.parametrize("at", range(8, 12))
@pytest.mark.parametrize(("start", "stop"), [(0, 332), (3, 325), (0, 321)])
def test_a_claim_that_ends_within_a_chunk_comes_back(pair: Pair, start: int, stop: int, at: int) -> None:
    """All but the last token, as engines do: the last chunk goes on behind what is wanted."""
    pair.producer.transport.meddle = Cutter(pair, [at], channel=True, link=False)
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, stop, start=start))
    pair.fill(ticket, OURS, TOKENS)
    assert pair.outcome().reason is None
    np.testing.assert_array_equal(
        read(pair.consumer.cache, THEIRS, start, stop), read(pair.producer.cache, OURS, start, stop)
    )
    sent, loaded = pair.settle(ticket, "drained", "loaded")
    assert sent is not None
    assert loaded is not None
    assert (sent.kv_bytes, sent.digest) == (loaded.kv_bytes, loaded.digest)


@pytest.mark.parametrize("at", [0, 4, 9, 10])
def test_a_claim_of_several_parts_comes_back_when_one_is_complete(at: int) -> None:
    """Its empty part is asked for again with the others, and must not be sent once more."""
    groups = (
        CacheGroup("full", (0, 1), 2, 16, "bfloat16", 16, NHD),
        CacheGroup("full", (2,), 2, 16, "bfloat16", 16, NHD),
    )
    a = Engine.start(Shape(groups), "prefill", 1, transport=Meddling, chunk=4096)
    b = Engine.start(Shape(groups), "decode", 2)
    count = []

    def meddle(pushes: Sequence[Push]) -> Sequence[Push]:
        count.append(1)
        if len(count) == at + 1:
            cut(a.endpoints[0]._listener)
        return pushes

    try:
        transport = a.endpoints[0].transports.running["tcp"]
        assert isinstance(transport, Meddling)
        transport.meddle = meddle
        hand_over(a, b, 101, [[5, 2, 9, 0, 7, 11, 3]] * 2, [[3, 1, 8, 6, 2, 12, 4]] * 2, stop=99)
        assert len(count) > at
    finally:
        a.close()
        b.close()


def test_a_cut_while_prefill_is_waited_for(pair: Pair) -> None:
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, 100)
    eventually(lambda: pair.producer.endpoint._outgoing.used == 0)
    cut(pair.producer.endpoint._listener)
    eventually(lambda: pair.producer.endpoint._ledger.get(ticket.handoff).state == "filling")  # type: ignore[union-attr]
    pair.fill(ticket, OURS, TOKENS)
    assert pair.outcome().reason is None
    equal(pair)
    pair.settle(ticket, "drained", "loaded")


def test_a_consumer_that_does_not_come_back_is_given_up_soon(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection was closed, so it is dead or has forgotten; the deadline is a minute away."""
    monkeypatch.setattr(receive_module, "RESUMES", -1)
    gate = Gate(2)
    pair.producer.transport.meddle = gate
    ticket, text = pair.ticket(60)
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    assert gate.reached.wait(10)
    cut(pair.producer.endpoint._listener)
    gate.open()
    reason = pair.outcome().reason
    assert reason is not None
    assert reason.code == "peer_gone"
    sent, _ = pair.settle(ticket, "failed", "failed")
    assert sent is not None
    assert sent.reason is not None
    assert sent.reason.code == "peer_gone"


def test_a_claim_that_comes_back_too_late_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers_module, "CLOSED_SECONDS", 0.0)
    dial = pair.consumer.endpoint.consumer._dial
    over = threading.Event()

    def late(address: str, deadline: float):  # type: ignore[no-untyped-def]
        if cutter._count:
            eventually(lambda: pair.producer.record(ticket).state == "failed")  # type: ignore[union-attr]
            over.set()
        return dial(address, deadline)

    pair.consumer.endpoint.consumer._dial = late
    cutter = pair.producer.transport.meddle = Cutter(pair, [2], channel=True, link=False)
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    reason = pair.outcome().reason
    assert over.is_set()
    assert reason is not None
    assert reason.code == "peer_gone"  # what the producer ended it with
    pair.settle(ticket, "failed", "failed")


def test_a_restarted_producer_does_not_go_on(make: Make) -> None:
    """At the same address, with another epoch: the ticket is for its former self."""
    pair, again = make(), make()
    consumer = pair.consumer.endpoint.consumer
    dial = consumer._dial
    addresses = [side.producer.endpoint.contract.ranks[0].channel for side in (pair, again)]
    cutter = pair.producer.transport.meddle = Cutter(pair, [2], channel=True, link=False)
    consumer._dial = lambda address, deadline: dial(addresses[1 if cutter._count else 0], deadline)
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    reason = pair.outcome().reason
    assert reason is not None
    assert (reason.code, reason.field) == ("ticket_refused", "epoch")
    pair.settle(ticket, "failed", "failed")


class Relay:
    """Between a consumer and a producer's channel; `hush` drops the consumer's end and lets the other one hang."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._hushed: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def hush(self) -> None:
        for near, _ in list(self._pairs):  # those that come back at once are not meant
            self._hushed.add(near)
            near.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.close()
        for sock in (sock for pair in self._pairs for sock in pair):
            sock.close()

    def _accept(self) -> None:
        host, port = self._target.split(":")
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = socket.create_connection((host, int(port)))
            self._pairs.append((near, far))
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(near, a, b), daemon=True).start()

    def _copy(self, near: socket.socket, a: socket.socket, b: socket.socket) -> None:
        try:
            while data := a.recv(65536):
                b.sendall(data)
            if near not in self._hushed:
                b.shutdown(socket.SHUT_WR)
        except OSError:
            pass


@pytest.fixture
def relay(pair: Pair) -> Iterator[Relay]:
    made = Relay(pair.producer.endpoint.contract.ranks[0].channel)
    yield made
    made.close()


def test_a_claim_takes_over_from_a_connection_that_only_seems_alive(pair: Pair, relay: Relay) -> None:
    """The producer has not noticed that the link was cut: it waits on the old connection when the new one comes."""
    gate = Gate(2)
    pair.producer.transport.meddle = gate
    ticket, text = pair.ticket(30, channels=(relay.address,))
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    assert gate.reached.wait(10)
    relay.hush()
    gate.open()
    assert pair.outcome().reason is None
    equal(pair)
    sent, _ = pair.settle(ticket, "drained", "loaded")
    assert sent is not None
    assert sent.resumed == 1


@pytest.mark.parametrize("times", [1, 3])
def test_a_link_that_breaks_again_while_it_is_opened(pair: Pair, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Not refused, which would mean that there is nobody any more."""
    greet = Listener._greet
    cuts = []

    def cutting(listener: Listener, sock: socket.socket) -> socket.socket:
        if listener is pair.producer.endpoint._listener and cutter._count and len(cuts) < times:
            cuts.append(sock)
            sock.shutdown(socket.SHUT_RDWR)
        return greet(listener, sock)

    monkeypatch.setattr(Listener, "_greet", cutting)
    monkeypatch.setattr(receive_module, "RETRY_SECONDS", 0.01)
    cutter = pair.producer.transport.meddle = Cutter(pair, [3], channel=True, link=False)
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    assert pair.outcome().reason is None
    equal(pair)
    assert len(cuts) == times
    pair.settle(ticket, "drained", "loaded")


def test_a_link_that_cannot_be_opened_again_ends_the_claim(pair: Pair) -> None:
    cutter = Cutter(pair, [3], channel=False, link=True)

    def meddle(pushes: Sequence[Push]) -> Sequence[Push]:
        pushes = cutter(pushes)
        if cutter._count == 4:
            pair.consumer.transport.close()
        return pushes

    pair.producer.transport.meddle = meddle
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    reason = pair.outcome().reason
    assert reason is not None
    assert reason.code == "peer_gone"
    pair.settle(ticket, "failed", "failed")
    assert isinstance(pair.consumer.transport, TcpTransport)
