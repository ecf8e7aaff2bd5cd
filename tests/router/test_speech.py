"""What a worker and the owner say to each other arrives as it was said, however it is cut; nothing else is heard."""

from __future__ import annotations

import asyncio
from types import MappingProxyType
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deeplink.router import speech
from deeplink.router.admission import Need
from deeplink.router.engine import Engine, Said

from .fake_engine import make_contract

LARGE = st.integers(-(1 << 63), (1 << 64) - 1)
NEEDS = st.builds(
    Need,
    handoff=st.booleans(),
    tokens=st.integers(0, 1 << 40),
    output=st.integers(0, 1 << 40),
    session=st.text() | st.just("\udc80\ud800"),
    chain=st.lists(LARGE).map(tuple),
    chains=st.none() | st.dictionaries(st.integers(1, 1 << 20), st.lists(LARGE).map(tuple)),
    barred=st.dictionaries(st.text(), st.text()).map(MappingProxyType),
    generates=st.booleans(),
)
ENGINES = [
    Engine("a", "http://a:1", "http://a:2", make_contract("both"), ""),
    Engine(
        "b", "http://b:1", "", None, "why", 0.5, "k", "prefill", {"x": "y"}, "b:1", 3, Said("decode", False, {"s": "t"})
    ),
]


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.data = b""
        self.over = False

    def write(self, data: Any) -> None:
        self.data += data

    def is_closing(self) -> bool:
        return self.over

    def close(self) -> None:
        self.over = True


def said(messages: list[Any]) -> bytes:
    async def say() -> bytes:
        wire, line = Wire(), speech.Line(True, lambda message: None, lambda: None)
        line.connection_made(wire)
        for message in messages:
            line.send(message)
        await asyncio.sleep(0)
        return wire.data

    return asyncio.run(say())


def heard(data: bytes, sizes: list[int], *, owner: bool) -> tuple[list[Any], bool]:
    """The messages in it, and whether the connection was ended."""

    async def hear() -> tuple[list[Any], bool]:
        found: list[Any] = []
        wire, line, rest = Wire(), speech.Line(owner, found.append, lambda: None), data
        line.connection_made(wire)
        for size in [*sizes, len(data)]:
            if rest[:size] and not wire.over:
                line.data_received(rest[:size])
            rest = rest[size:]
        return found, wire.over

    return asyncio.run(hear())


@given(st.lists(NEEDS, max_size=4), st.lists(st.integers(1, 40), max_size=30))
def test_needs_arrive_as_they_were_said(needs: list[Need], sizes: list[int]) -> None:
    messages = [speech.Choose(number, speech.Wanted.of(need), ["e"]) for number, need in enumerate(needs)]
    found, over = heard(said(messages), sizes, owner=True)
    assert (found, over) == (messages, False)
    assert [message.wanted.need() for message in found] == needs


def test_engines_arrive_as_they_are_known() -> None:
    state = speech.State(ENGINES, {"a": 1.5}, ["a"], [16, 64])
    (found,), _ = heard(said([state]), [7], owner=False)
    assert found == state
    assert found.engines[0].contract == ENGINES[0].contract


@given(st.binary(min_size=1, max_size=64))
def test_what_cannot_be_read_ends_the_connection(data: bytes) -> None:
    whole = len(data).to_bytes(4, "big") + data
    found, over = heard(whole, [], owner=True)
    assert over or len(found) == 1


def test_what_is_too_long_is_not_waited_for() -> None:
    assert heard((speech.MAX_MESSAGE + 1).to_bytes(4, "big"), [], owner=True) == ([], True)
