"""On one host a consumer reads its peer's staging where it is, and notices when that is taken away while it reads."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from loopback import HND, SECRET, VEC, Pair, make_pair, read

from deeplink.errors import DeeplinkError, ProtocolError, Refused
from deeplink.kvconnector.caches.group import Entrance
from deeplink.kvconnector.transport import arena as module
from deeplink.kvconnector.transport.arena import LEASES, Arena, Foreign, Loan
from deeplink.kvconnector.transport.base import Push
from deeplink.kvconnector.transport.shm import ShmLink, ShmTransport
from deeplink.kvconnector.transport.staging import Staging

TOKENS = 333
OURS, THEIRS = [5, 2, 9, 0, 7, 11], [3, 1, 8]


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = make_pair(
        {"layout": VEC, "others": {"shm": ShmTransport("127.0.0.1", SECRET)}},
        {"layout": HND, "others": {"shm": ShmTransport("127.0.0.1", SECRET)}},
    )
    yield made
    made.close()


def hand_over(pair: Pair) -> object:
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    pair.pump(ticket)
    reason = pair.outcome().reason
    pair.quiet()
    return reason


def test_nothing_goes_through_the_ring(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("copied into a slot")

    monkeypatch.setattr(ShmLink, "_send_slot", never)
    assert hand_over(pair) is None
    expected = read(pair.producer.cache, OURS, 0, TOKENS)
    np.testing.assert_array_equal(read(pair.consumer.cache, THEIRS, 0, TOKENS), expected)


def test_what_is_taken_back_while_it_is_read_is_not_loaded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer ends the handoff and gives the staging to another; the digest was right when it was looked at."""
    land = Entrance.land

    def late(entrance: Entrance, *arguments: object) -> None:
        producer = pair.producer.endpoint
        producer.producer.abort(ticket.handoff)
        piece = producer._outgoing.try_allocate(producer._outgoing.capacity)
        assert piece is not None, "all of it is free again"
        producer._outgoing.view(piece)[:] = b"\xee" * piece.length
        producer._outgoing.release(piece)
        land(entrance, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Entrance, "land", late)
    ticket, text = pair.ticket()
    pair.open(ticket, 20)
    pair.load(pair.order(ticket, text, THEIRS, 20))
    pair.fill(ticket, OURS, 20)
    reason = pair.outcome().reason
    assert reason is not None
    assert reason.code in ("handoff_failed", "aborted")
    pair.settle(ticket, "aborted", "failed")
    monkeypatch.undo()
    assert hand_over(pair) is None


def test_what_is_taken_back_before_it_is_verified_is_no_corruption(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from deeplink.kvconnector.handoffs.landing import Landings

    verified = Landings._verified

    def late(*arguments: object) -> int:
        producer = pair.producer.endpoint
        producer.producer.abort(ticket.handoff)
        piece = producer._outgoing.try_allocate(producer._outgoing.capacity)
        assert piece is not None
        producer._outgoing.view(piece)[:] = b"\xee" * piece.length
        producer._outgoing.release(piece)
        return verified(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Landings, "_verified", late)
    ticket, text = pair.ticket()
    pair.open(ticket, 20)
    pair.load(pair.order(ticket, text, THEIRS, 20))
    pair.fill(ticket, OURS, 20)
    reason = pair.outcome().reason
    assert reason is not None
    assert reason.code in ("handoff_failed", "aborted")
    pair.settle(ticket, "aborted", "failed")


# -- leases --------------------------------------------------------------------------------------------------


def shared(capacity: int = 1 << 16) -> tuple[Staging, Foreign]:
    staging = Staging(capacity, Arena(capacity))
    assert staging.arena is not None
    return staging, Foreign(staging.arena._descriptor)


def test_a_loan_is_intact_until_its_piece_is_released() -> None:
    staging, foreign = shared()
    piece = staging.try_allocate(1000)
    other = staging.try_allocate(1000)
    assert piece is not None
    assert other is not None
    staging.view(piece)[:] = bytes(range(250)) * 4
    loan = staging.loan(staging.view(piece)[100:300])
    assert loan is not None
    lent = foreign.lent(loan)
    assert bytes(lent.memory) == (bytes(range(250)) * 4)[100:300]
    assert lent.intact()
    staging.release(other)
    assert lent.intact()
    staging.release(piece)
    assert not lent.intact()
    again = staging.try_allocate(1000)
    assert again is not None
    assert not lent.intact()


def test_only_what_is_held_can_be_lent() -> None:
    staging, _ = shared()
    piece = staging.try_allocate(1000)
    assert piece is not None
    view = staging.view(piece)
    assert staging.loan(memoryview(bytearray(10))) is None
    assert staging.loan(view[:0]) is None
    staging.release(piece)
    assert staging.loan(view) is None
    assert Staging(4096).loan(memoryview(bytearray(10))) is None


def test_more_pieces_than_leases() -> None:
    """What has no lease is copied."""
    staging, _ = shared(64 * (LEASES + 2))
    pieces = [staging.try_allocate(64) for _ in range(LEASES + 1)]
    loans = [staging.loan(staging.view(piece)) for piece in pieces if piece is not None]
    assert [loan is None for loan in loans].count(True) == 1
    for piece in pieces:
        assert piece is not None
        staging.release(piece)
    assert sorted(staging._leases) == list(range(LEASES))


@pytest.mark.parametrize(
    "loan",
    [Loan(0, 1 << 17, 0, 0), Loan(1 << 63, 1, 0, 0), Loan(0, 1, LEASES, 0), Loan((1 << 64) - 1, 1, 0, 0)],
)
def test_a_loan_that_leaves_the_memory_is_refused(loan: Loan) -> None:
    _, foreign = shared()
    with pytest.raises(Refused):
        foreign.lent(loan)


def test_a_peer_cannot_write_what_it_was_lent() -> None:
    staging, _ = shared()
    a, b = socket.socketpair(socket.AF_UNIX)
    with a, b:
        assert staging.arena is not None
        staging.arena.send(a, time.monotonic() + 5)
        _, descriptors, _, _ = socket.recv_fds(b, 1, 1)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptors[0], 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(descriptors[0])


def unsealed() -> int:
    descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 1 << 16)
    return descriptor


def tiny() -> int:
    descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, module._SEALS)
    return descriptor


@pytest.mark.parametrize("make", [unsealed, tiny])
def test_memory_that_could_crash_its_reader_is_not_mapped(make: Callable[[], int]) -> None:
    descriptor = make()
    with pytest.raises(ProtocolError):
        Foreign(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("said", [b"\2", b"\1", b""])
def test_a_peer_that_sends_no_memory(said: bytes) -> None:
    a, b = socket.socketpair(socket.AF_UNIX)
    with a, b:
        a.sendall(said)
        a.shutdown(socket.SHUT_WR)
        with pytest.raises(DeeplinkError):
            module.receive(b, time.monotonic() + 5)


def test_parts_of_regions_are_copied_from_where_they_are() -> None:
    sender, receiver = ShmTransport("", SECRET), ShmTransport("", SECRET)
    staging = Staging(1 << 16, Arena(1 << 16))
    sender.lend(staging)
    piece = staging.try_allocate(3000)
    assert piece is not None
    source = staging.view(piece)
    source[:] = os.urandom(3000)
    link = sender.connect(receiver.address, time.monotonic() + 5)
    target = bytearray(2000)
    region = receiver.register(memoryview(target))
    pushes = [Push(source[:1000], region.key, 1000), Push(source[2000:], region.key, 0)]
    link.push(pushes, time.monotonic() + 5)
    assert bytes(target) == bytes(source[2000:]) + bytes(source[:1000])
    assert region.lent is None
    link.push([Push(source[500:2500], region.key, 0)], time.monotonic() + 5)
    assert region.lent is not None
    assert bytes(region.lent.memory) == bytes(source[500:2500])
    link.close()
    sender.close()
    receiver.close()
