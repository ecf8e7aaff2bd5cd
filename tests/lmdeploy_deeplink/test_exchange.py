"""Migrations between two engines with nothing in them but their caches, over the real channel and transports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_cache import Fake, FakeStated
from loopback import SECRET
from world import read

from deeplink.config import VARIABLE
from deeplink.errors import ConfigError, DeadlineExceeded, HandoffError, LayoutError, ProtocolError, Refused
from deeplink.kvconnector.caches.group import Group
from deeplink.kvconnector.contracts.negotiate import Agreement, negotiate
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.handoffs.first_token import FirstToken
from lmdeploy_deeplink.migration import adapter, exchange
from lmdeploy_deeplink.migration.exchange import Exchange
from lmdeploy_deeplink.migration.requests import Admitted

SECONDS = 30.0
PROMPT = list(range(50))
PEER = "http://127.0.0.1:1"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Exchange]]:
    groups: dict[int, Group] = {}
    started: list[Exchange] = []

    monkeypatch.setattr(adapter, "check_supported", lambda _: None)
    monkeypatch.setattr(adapter, "read_group", lambda engine, _: groups.setdefault(id(engine), engine.group()))
    monkeypatch.setattr(adapter, "read_model", lambda engine, _: engine.model())
    monkeypatch.setattr(adapter, "stated", lambda engine, model: FakeStated(engine.role, model))
    monkeypatch.setattr(exchange.shared, "load", lambda _: SECRET)

    def start(fake: Fake, seconds: float = SECONDS, staging: int = 4 << 20) -> Exchange:
        file = tmp_path / f"{len(started)}.toml"
        file.write_text(f"[kv]\nforeign_seconds = {seconds}\nstaging = {staging}\n")
        monkeypatch.setenv(VARIABLE, str(file))
        made = Exchange(fake, "model")
        made.fake, made.group = fake, groups[id(fake)]  # type: ignore[attr-defined]
        started.append(made)
        return made

    yield start
    for one in started:
        one.close()


def held(one: Exchange) -> tuple[int, int, int]:
    endpoint = one._part.endpoint
    return endpoint._outgoing.used, endpoint._incoming.used, endpoint._ledger.open


def quiet(*ones: Exchange) -> None:
    end = time.monotonic() + 10
    while any(any(held(one)) for one in ones):
        assert time.monotonic() < end, [held(one) for one in ones]
        time.sleep(0.01)


def pair(make: Callable[..., Exchange], **options: Any) -> tuple[Exchange, Exchange]:
    prefill, decode = make(Fake("prefill", 16), **options), make(Fake("decode", 64), **options)
    prefill.foreign.connect("decode", decode.foreign.describe())
    decode.foreign.connect(PEER, prefill.foreign.describe())
    return prefill, decode


FIRST = FirstToken(7, -0.5, ((7, -0.5), (8, -1.5)))


def offer(prefill: Exchange, tokens: list[int], extra: list[str], table: list[int]) -> int:
    """As LMDeploy's own router has it."""
    number, ticket = prefill.foreign.to_offer()
    prefill.offer(ticket, tokens, extra, table, FIRST)
    return number


async def load(
    decode: Exchange, session: int, peer: str, numbers: list[int], tokens: list[int], extra: list[str], table: list[int]
) -> FirstToken:
    return await decode.load(session, decode.foreign.to_load(peer, numbers), tokens, extra, table)


def kv(one: Exchange, table: list[int], tokens: int) -> np.ndarray[Any, Any]:
    return read((one.group,), 0, table, 0, tokens)  # type: ignore[attr-defined]


def test_unlike_blocks_and_every_byte_arrives(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make)
    theirs, ours = [7, 2, 9, 4], [5]
    number = offer(prefill, PROMPT, [], theirs)
    assert prefill.settled(prefill.foreign.name(number))
    expected = kv(prefill, theirs, len(PROMPT))
    asyncio.run(load(decode, 1, PEER, [number], PROMPT, [], ours))
    assert np.array_equal(kv(decode, ours, len(PROMPT)), expected)
    quiet(prefill, decode)


def test_blocks_are_free_before_anyone_comes(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make)
    theirs, ours = [1, 2, 3, 4], [6]
    number = offer(prefill, PROMPT, [], theirs)
    expected = kv(prefill, theirs, len(PROMPT))
    assert prefill.settled(prefill.foreign.name(number))
    for layer in prefill.group.values.layers:  # type: ignore[attr-defined]
        layer[:] = 0  # the next request's
    asyncio.run(load(decode, 1, PEER, [number], PROMPT, [], ours))
    assert np.array_equal(kv(decode, ours, len(PROMPT)), expected)


def test_many_at_once(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make)
    numbers = [offer(prefill, [*PROMPT, n], [], [4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3]) for n in range(5)]

    async def all_of_them() -> None:
        await asyncio.gather(
            *(load(decode, n, PEER, [number], [*PROMPT, n], [], [n + 3]) for n, number in enumerate(numbers))
        )

    asyncio.run(all_of_them())
    for n in range(5):
        assert np.array_equal(kv(decode, [n + 3], 51), kv(prefill, [4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3], 51))
    quiet(prefill, decode)


def test_full_staging_keeps_the_blocks_until_there_is_room(make: Callable[..., Exchange]) -> None:
    tile = 3 * 2 * 2 * 32 * 2 * 16  # of 16 tokens
    prefill, decode = pair(make, staging=12 * tile)  # of which a chunk is half
    first = offer(prefill, PROMPT, [], [0, 1, 2, 3])
    second = offer(prefill, PROMPT[::-1], [], [4, 5, 6, 7])
    assert prefill.settled(prefill.foreign.name(first))
    assert not prefill.settled(prefill.foreign.name(second))
    asyncio.run(load(decode, 1, PEER, [first], PROMPT, [], [5]))
    end = time.monotonic() + 10
    while not prefill.settled(prefill.foreign.name(second)):
        assert time.monotonic() < end
        time.sleep(0.01)
    asyncio.run(load(decode, 2, PEER, [second], PROMPT[::-1], [], [6]))
    assert np.array_equal(kv(decode, [6], len(PROMPT)), kv(prefill, [4, 5, 6, 7], len(PROMPT)))


def test_another_prompt_is_refused(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make)
    number = offer(prefill, PROMPT, [], [1, 2, 3, 4])
    with pytest.raises(Refused, match="same prompt") as caught:
        asyncio.run(load(decode, 1, PEER, [number], PROMPT[::-1], [], [5]))
    assert caught.value.field == "prompt"
    quiet(prefill, decode)


def test_another_adapter_is_refused(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make)
    number = offer(prefill, PROMPT, ["lora=a"], [1, 2, 3, 4])
    with pytest.raises(Refused, match="same lora") as caught:
        asyncio.run(load(decode, 1, PEER, [number], PROMPT, ["lora=b"], [5]))
    assert caught.value.field == "lora"


def test_other_weights_are_refused_when_they_are_connected(make: Callable[..., Exchange]) -> None:
    prefill, decode = make(Fake("prefill", 16)), make(Fake("decode", 64, weights="other"))
    for one, other in ((prefill, decode), (decode, prefill)):
        with pytest.raises(Refused) as caught:
            one.foreign.connect("peer", other.foreign.describe())
        assert caught.value.field == "model.weights"


def test_an_engine_that_was_not_connected(make: Callable[..., Exchange]) -> None:
    _, decode = pair(make)
    with pytest.raises(HandoffError, match="has not been connected"):
        asyncio.run(load(decode, 1, "http://elsewhere", [1], PROMPT, [], [5]))
    decode.foreign.forget(PEER)
    with pytest.raises(HandoffError, match="has not been connected"):
        asyncio.run(load(decode, 1, PEER, [1], PROMPT, [], [5]))


@pytest.mark.parametrize("numbers", [[], [1, 2, 3]])
def test_block_numbers_of_another_backend(make: Callable[..., Exchange], numbers: list[int]) -> None:
    _, decode = pair(make)
    with pytest.raises(Refused, match="--migration-backend deeplink") as caught:
        asyncio.run(load(decode, 1, PEER, numbers, PROMPT, [], [5]))
    assert caught.value.field == "cache_block_ids"


def test_what_nobody_offered_fails_within_its_time(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make, seconds=0.5)
    with pytest.raises(DeadlineExceeded):
        asyncio.run(load(decode, 1, PEER, [12345], PROMPT, [], [5]))
    quiet(prefill, decode)


def test_what_nobody_comes_for_is_let_go(make: Callable[..., Exchange]) -> None:
    prefill, _ = pair(make, seconds=0.3)
    offer(prefill, PROMPT, [], [1, 2, 3, 4])
    assert any(held(prefill))
    quiet(prefill)


def test_what_is_given_up_is_let_go_at_once(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make)
    number = offer(prefill, PROMPT, [], [1, 2, 3, 4])
    prefill.drop(prefill.foreign.name(number))
    quiet(prefill)
    with pytest.raises(HandoffError, match="given up"):
        asyncio.run(load(decode, 1, PEER, [number], PROMPT, [], [5]))
    prefill.drop(prefill.foreign.name(number))


def test_no_number_is_a_blocks_or_a_sessions(make: Callable[..., Exchange]) -> None:
    prefill, _ = pair(make)
    numbers = [offer(prefill, [n], [], [n]) for n in range(20)]
    assert len(set(numbers)) == 20
    assert all(1 << 47 <= number < 1 << 48 for number in numbers)


def test_a_number_is_good_once(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make)
    number = offer(prefill, PROMPT, [], [1, 2, 3, 4])
    asyncio.run(load(decode, 1, PEER, [number], PROMPT, [], [5]))
    with pytest.raises(Refused, match="claimed before"):
        asyncio.run(load(decode, 2, PEER, [number], PROMPT, [], [6]))
    quiet(prefill, decode)


def test_who_leaves_ends_the_load_and_nothing_is_written_after(make: Callable[..., Exchange]) -> None:
    """It waits for an offer that does not come; the blocks are another's as soon as `leave` returns."""
    prefill, decode = pair(make, seconds=30.0)

    async def leave() -> None:
        loading = asyncio.create_task(load(decode, 7, PEER, [99], PROMPT, [], [5]))
        await asyncio.sleep(0.2)
        decode.leave(7)
        with pytest.raises(HandoffError):
            await asyncio.wait_for(loading, 5)

    asyncio.run(leave())
    quiet(prefill, decode)


def test_a_request_that_is_sent_twice_is_loaded_once(make: Callable[..., Exchange]) -> None:
    """Each hears of its own end: nothing has come into the blocks of the second."""
    prefill, decode = pair(make)
    number = offer(prefill, PROMPT, [], [1, 2, 3, 4])

    async def twice() -> list[Any]:
        both = (load(decode, session, PEER, [number], PROMPT, [], [4 + session]) for session in (1, 2))
        return await asyncio.wait_for(asyncio.gather(*both, return_exceptions=True), 10)

    first, second = asyncio.run(twice())
    assert first == FIRST
    assert isinstance(second, Refused)
    assert np.array_equal(kv(decode, [5], len(PROMPT)), kv(prefill, [1, 2, 3, 4], len(PROMPT)))
    quiet(prefill, decode)


def test_a_sessions_number_may_be_taken_by_another_before_the_first_has_heard_of_its_end(
    make: Callable[..., Exchange],
) -> None:
    prefill, decode = pair(make)

    async def leave_twice() -> None:
        first = asyncio.create_task(load(decode, 7, PEER, [98], PROMPT, [], [5]))
        await asyncio.sleep(0.1)
        decode.leave(7)
        second = asyncio.create_task(load(decode, 7, PEER, [99], PROMPT, [], [6]))
        await asyncio.gather(first, return_exceptions=True)
        assert not second.done()
        decode.leave(7)
        with pytest.raises(HandoffError, match="given up"):
            await asyncio.wait_for(second, 5)

    asyncio.run(leave_twice())
    quiet(prefill, decode)


def test_leaving_without_a_load_is_nothing(make: Callable[..., Exchange]) -> None:
    _, decode = pair(make)
    decode.leave(1)


@pytest.mark.parametrize("text", ["", "x", "bm8gY29udHJhY3Q="])
def test_a_description_that_is_none(make: Callable[..., Exchange], text: str) -> None:
    decode = make(Fake("decode", 64))
    with pytest.raises((ProtocolError, Refused)):
        decode.foreign.connect(PEER, text)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_with_other_weights_nothing_is_handed_over(make: Callable[..., Exchange], side: str) -> None:
    """The contract is of those that an engine was started with."""
    prefill, decode = pair(make, seconds=2)
    number = offer(prefill, PROMPT, [], [1, 2, 3, 4])
    (prefill if side == "prefill" else decode)._part.end("other weights")
    with pytest.raises(HandoffError):
        asyncio.run(load(decode, 1, PEER, [number], PROMPT, [], [5]))
    quiet(prefill, decode)


def test_a_restarted_engine_is_another(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make)
    number = offer(prefill, PROMPT, [], [1, 2, 3, 4])
    stated = decode.foreign._peers[PEER]
    decode.foreign._peers[PEER] = msgspec.structs.replace(stated, epoch="another")
    with pytest.raises(Refused, match="incarnation"):
        asyncio.run(load(decode, 1, PEER, [number], PROMPT, [], [5]))


def test_without_a_time_other_routers_are_refused(make: Callable[..., Exchange]) -> None:
    prefill, decode = (make(Fake(role, 16), seconds=0.0) for role in ("prefill", "decode"))
    for refused in (
        prefill.foreign.describe,
        prefill.foreign.to_offer,
        lambda: decode.foreign.connect(PEER, ""),
        lambda: decode.foreign.to_load(PEER, [1]),
    ):
        with pytest.raises(ConfigError) as caught:
            refused()
        assert caught.value.field == "kv.foreign_seconds"


def ticket(prefill: Exchange, decode: Exchange, milliseconds: int = 30_000) -> str:
    """As deeplink's router makes it."""
    ours, theirs = prefill._part.contract, decode._part.contract
    agreement = negotiate(ours, theirs)
    assert isinstance(agreement, Agreement)
    return tickets.mint(tickets.issue(tickets.new_handoff(), ours, theirs, agreement, milliseconds), SECRET)


def test_a_ticket_of_the_routers_and_the_first_token_with_it(make: Callable[..., Exchange]) -> None:
    prefill, decode = (make(Fake(role, size), seconds=0.0) for role, size in (("prefill", 16), ("decode", 64)))
    text = ticket(prefill, decode)
    prefill.offer(prefill.admit("produce", text), PROMPT, [], [7, 2, 9, 4], FIRST)
    first = asyncio.run(decode.load(1, decode.admit("consume", text), PROMPT, [], [5]))
    assert first == FIRST
    assert np.array_equal(kv(decode, [5], len(PROMPT)), kv(prefill, [7, 2, 9, 4], len(PROMPT)))
    quiet(prefill, decode)


def test_tickets_for_another_side_or_start_or_of_nobodys_are_refused(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make)
    text = ticket(prefill, decode)
    for engine, side, shown, field in (
        (prefill, "consume", text, "side"),
        (decode, "produce", text, "side"),
        (decode, "consume", text[:-4] + "AAAA", "ticket"),
        (decode, "consume", ticket(prefill, make(Fake("decode", 64))), "epoch"),
    ):
        with pytest.raises(Refused) as caught:
            engine.admit(side, shown)
        assert caught.value.field == field


def test_a_request_that_leaves_before_its_prompt_is_computed(make: Callable[..., Exchange]) -> None:
    """Whoever waits for its cache hears of it at once."""
    prefill, decode = pair(make)
    text = ticket(prefill, decode)
    prefill.abandon(prefill.admit("produce", text))
    with pytest.raises(HandoffError, match="given up"):
        asyncio.run(asyncio.wait_for(decode.load(1, decode.admit("consume", text), PROMPT, [], [5]), 10))
    other = decode.admit("consume", ticket(prefill, decode))
    decode.abandon(other)
    record = decode._part.endpoint.record(other.handoff)
    assert record is not None
    assert record.state == "failed"
    quiet(prefill, decode)


def test_the_time_of_a_ticket_runs_while_a_request_waits(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make)
    admitted = Admitted.now(decode.admit("consume", ticket(prefill, decode, 300)))
    assert 0 < admitted.left().milliseconds <= 300
    time.sleep(0.31)
    with pytest.raises(DeadlineExceeded):
        admitted.left()


def test_what_cannot_be_staged_keeps_no_blocks(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make)
    admitted = prefill.admit("produce", ticket(prefill, decode))
    with pytest.raises(LayoutError):
        prefill.offer(admitted, PROMPT, [], [1], FIRST)
    assert prefill.settled(admitted.handoff)
    quiet(prefill)
