"""Whole handoffs by one-sided libraries: both engines' staging is shown to them, and nothing else is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from copier import CopierTransport
from libraries import need
from loopback import SECRET, Pair, read
from sockets import eventually

from deeplink.errors import HandoffError
from deeplink.kvconnector.transport import mooncake, nixl, onesided
from deeplink.kvconnector.transport.base import Push
from deeplink.kvconnector.transport.onesided import OneSided

TOKENS = 333
OURS, THEIRS = [5, 0, 7, 9, 2, 11], [3, 1, 8]


def unused(pushes: Sequence[Push]) -> Sequence[Push]:
    raise HandoffError("tcp was not agreed")


@pytest.mark.parametrize(
    ("load", "factory"), [(nixl.load, nixl.NixlTransport), (mooncake.load, mooncake.MooncakeTransport)]
)
def test_a_handoff(
    make: Callable[..., Pair], load: Callable[[], object], factory: Callable[[str, bytes], OneSided]
) -> None:
    need(load)
    transports = [factory("127.0.0.1", SECRET) for _ in range(2)]
    pair = make(
        producer={"others": {"library": transports[0]}},
        consumer={"others": {"library": transports[1]}},
    )
    pair.producer.transport.meddle = unused
    for _ in range(2):
        pair.hand_over(TOKENS, OURS, THEIRS)
        ours, theirs = read(pair.producer.cache, OURS, 0, TOKENS), read(pair.consumer.cache, THEIRS, 0, TOKENS)
        np.testing.assert_array_equal(ours, theirs)
    for transport in transports:
        # Both arenas, and nothing besides, was ever registered.
        assert transport._arenas.version == 2


def test_a_late_write_finds_no_other_handoff_there(make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that was posted and has not landed by the deadline keeps its place in staging until it has."""
    monkeypatch.setattr(onesided, "STOP_SECONDS", 0.2)
    ours, theirs = CopierTransport(), CopierTransport()
    pair = make(producer={"others": {"copier": ours}}, consumer={"others": {"copier": theirs}})
    pair.producer.transport.meddle = unused
    ours.library.landing.clear()
    ticket, text = pair.ticket(1.0)
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    reason = pair.outcome().reason
    assert reason is not None
    assert reason.code == "deadline_exceeded"
    incoming = pair.consumer.endpoint._incoming
    assert 0 < incoming.used < incoming.capacity
    ours.library.landing.set()
    eventually(lambda: not any(kept._region.writers for kept in theirs._kept))  # type: ignore[attr-defined]
    # Whatever is loaded next looks whether it is free again.
    pair.hand_over(TOKENS, OURS, THEIRS)
    assert not theirs._kept
