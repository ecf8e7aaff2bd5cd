"""A ticket is what the router minted, whole and unchanged, or it is refused."""

from __future__ import annotations

import base64

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import SECRET

from deeplink.errors import TicketRefused
from deeplink.kvconnector.handoffs.ticket import MAX_TEXT, Ticket, mint, new_handoff, verify

TICKET = Ticket("0123456789ab", "producer", "consumer", ("10.0.0.1:4000",), 30_000, 2)
TEXT = mint(TICKET, SECRET)


@given(
    st.builds(
        Ticket,
        *[st.text(max_size=256)] * 3,  # type: ignore[arg-type]
        st.lists(st.text(max_size=256), min_size=1, max_size=9).map(tuple),
        st.integers(1, 86_400_000),
        st.integers(1, 64),
        st.lists(st.lists(st.integers(0, 9), max_size=9).map(tuple), min_size=1, max_size=9).map(tuple),
        st.lists(st.text(max_size=256), max_size=3).map(tuple),
    )
)
def test_round_trip(ticket: Ticket) -> None:
    text = mint(ticket, SECRET)
    if len(text) <= MAX_TEXT:
        assert verify(text, SECRET) == ticket


def test_handoffs_are_not_guessable_or_repeated() -> None:
    names = {new_handoff() for _ in range(1000)}
    assert len(names) == 1000
    assert all(len(name) == 24 for name in names)


def test_another_secret() -> None:
    with pytest.raises(TicketRefused, match="not minted with this engine's secret") as caught:
        verify(TEXT, SECRET + b"x")
    assert "secret_file" in caught.value.remedy


def test_forged() -> None:
    body = base64.urlsafe_b64decode(TEXT)[32:]
    for mac in (b"", bytes(32), b"x" * 31):
        with pytest.raises(TicketRefused):
            verify(base64.urlsafe_b64encode(mac + body).decode(), SECRET)


@given(st.integers(0, len(TEXT) - 1), st.characters())
def test_any_changed_character(at: int, character: str) -> None:
    changed = TEXT[:at] + character + TEXT[at + 1 :]
    try:
        # base64 has a few spare bits, so another text may mean the same bytes; never another ticket.
        assert verify(changed, SECRET) == TICKET
    except TicketRefused:
        assert changed != TEXT


@given(st.integers(0, len(base64.urlsafe_b64decode(TEXT)) * 8 - 1))
def test_any_flipped_bit(bit: int) -> None:
    raw = bytearray(base64.urlsafe_b64decode(TEXT))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TicketRefused):
        verify(base64.urlsafe_b64encode(raw).decode(), SECRET)


@given(st.integers(0, len(TEXT) - 1))
def test_truncated(length: int) -> None:
    with pytest.raises(TicketRefused):
        verify(TEXT[:length], SECRET)


@given(st.one_of(st.text(), st.binary(), st.none(), st.integers(), st.lists(st.integers()), st.just("x" * 5000)))
def test_garbage(garbage: object) -> None:
    with pytest.raises(TicketRefused) as caught:
        verify(garbage, SECRET)
    assert caught.value.field == "ticket"


@pytest.mark.parametrize(
    "change",
    [
        {"milliseconds": 0},
        {"milliseconds": -5},
        {"milliseconds": 86_400_001},
        {"claims": 0},
        {"claims": 65},
        {"handoff": "x" * 257},
        {"channels": 7},
        {"channels": ()},
        {"channels": ("x" * 257,)},
        {"takes": ()},
        {"takes": ((-1,),)},
    ],
)
def test_even_the_router_cannot_mint_nonsense(change: dict[str, object]) -> None:
    with pytest.raises(TicketRefused, match="malformed"):
        verify(mint(msgspec.structs.replace(TICKET, **change), SECRET), SECRET)
