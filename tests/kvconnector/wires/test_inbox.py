"""What a peer says, taken in other pieces than it was sent in."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.errors import DeadlineExceeded, PeerGone
from deeplink.kvconnector.wires import inbox, wire
from deeplink.kvconnector.wires.inbox import Inbox

SECONDS = 10.0
SIZES = st.lists(st.sampled_from([1, 3, 7, 40, 64, 65, 129, 500]), min_size=1, max_size=12)


@given(SIZES, st.sampled_from([1, 8, 64, 1 << 16]), st.booleans())
def test_whatever_the_pieces_are(sizes: list[int], room: int, at_once: bool) -> None:
    """Nothing is lost, doubled, or out of order; and nothing is said to be waiting that is not."""
    data = bytes(k % 251 for k in range(sum(sizes)))
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.MonkeyPatch.context() as patch:
        patch.setattr(inbox, "ROOM", room)
        box = Inbox(ours)
        deadline = time.monotonic() + SECONDS
        if at_once:
            wire.send(theirs, data, deadline)
        done = 0
        for size in sizes:
            if not at_once:
                wire.send(theirs, data[done : done + size], deadline)
            assert box.take(size, deadline) == data[done : done + size]
            done += size
        assert not box.waiting


def test_the_rest_waits_here() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        box = Inbox(ours)
        theirs.sendall(b"one two")
        assert box.take(4, time.monotonic() + SECONDS) == b"one "
        assert box.waiting
        assert not wire.readable(ours, 0)
        theirs.close()
        assert box.take(3, time.monotonic() + SECONDS) == b"two"
        with pytest.raises(PeerGone):
            box.take(1, time.monotonic() + SECONDS)


def test_the_deadline_holds() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"half")
        with pytest.raises(DeadlineExceeded):
            Inbox(ours).take(8, time.monotonic() + 0.05)


def test_it_waits_for_what_comes_late() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        timer = threading.Timer(0.05, theirs.sendall, [b"late"])
        timer.start()
        assert Inbox(ours).take(4, time.monotonic() + SECONDS) == b"late"
        timer.join(SECONDS)
