"""Migrations between two engines with nothing in them but their caches, over the real channel and transports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from loopback import SECRET
from world import Shape, read

from deeplink.config import VARIABLE
from deeplink.errors import ConfigError, DeadlineExceeded, HandoffError, ProtocolError, Refused
from deeplink.kvconnector.contract import CacheGroup, Contract, Model, Rank
from deeplink.kvconnector.group import Group
from lmdeploy_deeplink.migration import adapter, exchange
from lmdeploy_deeplink.migration.exchange import Exchange

LAYOUT = "block (k: token head dim | v: token head dim)"
SECONDS = 30.0
PROMPT = list(range(50))
PEER = "http://127.0.0.1:1"


@dataclass
class Fake:
    """What `adapter` reads of an engine, without an engine."""

    role: str
    block_size: int
    weights: str = "w"
    layers: int = 3

    def group(self) -> Group:
        spec = CacheGroup("full", tuple(range(self.layers)), 2, 32, "bfloat16", self.block_size, LAYOUT)
        rank = Rank(0, 0, 0, ((0, 2),), (0, self.layers), "", {})
        (group,) = Shape((spec,), blocks=24).hold(rank, 1 if self.role == "prefill" else 2)
        return group


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Exchange]]:
    groups: dict[int, Group] = {}
    started: list[Exchange] = []

    def contract(
        engine: Fake, group: Group, model: Model, epoch: str, channel: str, transports: dict[str, str], casts: Any
    ) -> Contract:
        rank = Rank(0, 0, 0, (group.heads,), (0, engine.layers), channel, transports)
        return Contract("lmdeploy", "0", "cpu", engine.role, epoch, model, (group.spec,), (rank,), casts)

    monkeypatch.setattr(adapter, "check_supported", lambda _: None)
    monkeypatch.setattr(adapter, "read_group", lambda engine, _: groups.setdefault(id(engine), engine.group()))
    monkeypatch.setattr(
        adapter,
        "read_model",
        lambda engine, _: Model("LlamaForCausalLM", engine.layers, 100, "{}", "none", engine.weights),
    )
    monkeypatch.setattr(adapter, "make_contract", contract)
    monkeypatch.setattr(exchange.shared, "load", lambda: SECRET)

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
    endpoint = one._endpoint
    return endpoint._outgoing.used, endpoint._incoming.used, endpoint._ledger.open


def quiet(*ones: Exchange) -> None:
    end = time.monotonic() + 10
    while any(any(held(one)) for one in ones):
        assert time.monotonic() < end, [held(one) for one in ones]
        time.sleep(0.01)


def pair(make: Callable[..., Exchange], **options: Any) -> tuple[Exchange, Exchange]:
    prefill, decode = make(Fake("prefill", 16), **options), make(Fake("decode", 64), **options)
    prefill.connect("decode", decode.describe())
    decode.connect(PEER, prefill.describe())
    return prefill, decode


def kv(one: Exchange, table: list[int], tokens: int) -> np.ndarray[Any, Any]:
    return read((one.group,), 0, table, 0, tokens)  # type: ignore[attr-defined]


def test_unlike_blocks_and_every_byte_arrives(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make)
    theirs, ours = [7, 2, 9, 4], [5]
    number = prefill.offer(PROMPT, [], theirs)
    assert prefill.settled(number)
    expected = kv(prefill, theirs, len(PROMPT))
    asyncio.run(decode.load(1, PEER, [number], PROMPT, [], ours))
    assert np.array_equal(kv(decode, ours, len(PROMPT)), expected)
    quiet(prefill, decode)


def test_blocks_are_free_before_anyone_comes(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make)
    theirs, ours = [1, 2, 3, 4], [6]
    number = prefill.offer(PROMPT, [], theirs)
    expected = kv(prefill, theirs, len(PROMPT))
    assert prefill.settled(number)
    for layer in prefill.group.values.layers:  # type: ignore[attr-defined]
        layer[:] = 0  # the next request's
    asyncio.run(decode.load(1, PEER, [number], PROMPT, [], ours))
    assert np.array_equal(kv(decode, ours, len(PROMPT)), expected)


def test_many_at_once(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make)
    numbers = [prefill.offer([*PROMPT, n], [], [4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3]) for n in range(5)]

    async def all_of_them() -> None:
        await asyncio.gather(
            *(decode.load(n, PEER, [number], [*PROMPT, n], [], [n + 3]) for n, number in enumerate(numbers))
        )

    asyncio.run(all_of_them())
    for n in range(5):
        assert np.array_equal(kv(decode, [n + 3], 51), kv(prefill, [4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3], 51))
    quiet(prefill, decode)


def test_full_staging_keeps_the_blocks_until_there_is_room(make: Callable[..., Exchange]) -> None:
    tile = 3 * 2 * 2 * 32 * 2 * 16  # of 16 tokens
    prefill, decode = pair(make, staging=12 * tile)  # of which a chunk is half
    first = prefill.offer(PROMPT, [], [0, 1, 2, 3])
    second = prefill.offer(PROMPT[::-1], [], [4, 5, 6, 7])
    assert prefill.settled(first)
    assert not prefill.settled(second)
    asyncio.run(decode.load(1, PEER, [first], PROMPT, [], [5]))
    end = time.monotonic() + 10
    while not prefill.settled(second):
        assert time.monotonic() < end
        time.sleep(0.01)
    asyncio.run(decode.load(2, PEER, [second], PROMPT[::-1], [], [6]))
    assert np.array_equal(kv(decode, [6], len(PROMPT)), kv(prefill, [4, 5, 6, 7], len(PROMPT)))


def test_another_prompt_is_refused(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make)
    number = prefill.offer(PROMPT, [], [1, 2, 3, 4])
    with pytest.raises(Refused, match="same prompt") as caught:
        asyncio.run(decode.load(1, PEER, [number], PROMPT[::-1], [], [5]))
    assert caught.value.field == "prompt"
    quiet(prefill, decode)


def test_another_adapter_is_refused(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make)
    number = prefill.offer(PROMPT, ["lora=a"], [1, 2, 3, 4])
    with pytest.raises(Refused, match="same lora") as caught:
        asyncio.run(decode.load(1, PEER, [number], PROMPT, ["lora=b"], [5]))
    assert caught.value.field == "lora"


def test_other_weights_are_refused_when_they_are_connected(make: Callable[..., Exchange]) -> None:
    prefill, decode = make(Fake("prefill", 16)), make(Fake("decode", 64, weights="other"))
    for one, other in ((prefill, decode), (decode, prefill)):
        with pytest.raises(Refused) as caught:
            one.connect("peer", other.describe())
        assert caught.value.field == "model.weights"


def test_an_engine_that_was_not_connected(make: Callable[..., Exchange]) -> None:
    _, decode = pair(make)
    with pytest.raises(HandoffError, match="has not been connected"):
        asyncio.run(decode.load(1, "http://elsewhere", [1], PROMPT, [], [5]))
    decode.forget(PEER)
    with pytest.raises(HandoffError, match="has not been connected"):
        asyncio.run(decode.load(1, PEER, [1], PROMPT, [], [5]))


@pytest.mark.parametrize("numbers", [[], [1, 2, 3]])
def test_block_numbers_of_another_backend(make: Callable[..., Exchange], numbers: list[int]) -> None:
    _, decode = pair(make)
    with pytest.raises(Refused, match="--migration-backend deeplink") as caught:
        asyncio.run(decode.load(1, PEER, numbers, PROMPT, [], [5]))
    assert caught.value.field == "cache_block_ids"


def test_what_nobody_offered_fails_within_its_time(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make, seconds=0.5)
    with pytest.raises(DeadlineExceeded):
        asyncio.run(decode.load(1, PEER, [12345], PROMPT, [], [5]))
    quiet(prefill, decode)


def test_what_nobody_comes_for_is_let_go(make: Callable[..., Exchange]) -> None:
    prefill, _ = pair(make, seconds=0.3)
    prefill.offer(PROMPT, [], [1, 2, 3, 4])
    assert any(held(prefill))
    quiet(prefill)


def test_what_is_given_up_is_let_go_at_once(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make)
    number = prefill.offer(PROMPT, [], [1, 2, 3, 4])
    prefill.drop(number)
    quiet(prefill)
    with pytest.raises(HandoffError, match="given up"):
        asyncio.run(decode.load(1, PEER, [number], PROMPT, [], [5]))
    prefill.drop(number)


def test_no_number_is_a_blocks_or_a_sessions(make: Callable[..., Exchange]) -> None:
    prefill, _ = pair(make)
    numbers = [prefill.offer([n], [], [n]) for n in range(20)]
    assert len(set(numbers)) == 20
    assert all(1 << 47 <= number < 1 << 48 for number in numbers)


def test_a_number_is_good_once(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make)
    number = prefill.offer(PROMPT, [], [1, 2, 3, 4])
    asyncio.run(decode.load(1, PEER, [number], PROMPT, [], [5]))
    with pytest.raises(Refused, match="claimed before"):
        asyncio.run(decode.load(2, PEER, [number], PROMPT, [], [6]))
    quiet(prefill, decode)


def test_who_leaves_ends_the_load_and_nothing_is_written_after(make: Callable[..., Exchange]) -> None:
    """It waits for an offer that does not come; the blocks are another's as soon as `leave` returns."""
    prefill, decode = pair(make, seconds=30.0)

    async def leave() -> None:
        loading = asyncio.create_task(decode.load(7, PEER, [99], PROMPT, [], [5]))
        await asyncio.sleep(0.2)
        decode.leave(7)
        with pytest.raises(HandoffError):
            await asyncio.wait_for(loading, 5)

    asyncio.run(leave())
    quiet(prefill, decode)


def test_a_request_that_is_sent_twice_is_loaded_once(make: Callable[..., Exchange]) -> None:
    """Each hears of its own end: nothing has come into the blocks of the second."""
    prefill, decode = pair(make)
    number = prefill.offer(PROMPT, [], [1, 2, 3, 4])

    async def twice() -> list[BaseException | None]:
        both = (decode.load(session, PEER, [number], PROMPT, [], [4 + session]) for session in (1, 2))
        return await asyncio.wait_for(asyncio.gather(*both, return_exceptions=True), 10)

    first, second = asyncio.run(twice())
    assert first is None
    assert isinstance(second, Refused)
    assert np.array_equal(kv(decode, [5], len(PROMPT)), kv(prefill, [1, 2, 3, 4], len(PROMPT)))
    quiet(prefill, decode)


def test_a_sessions_number_may_be_taken_by_another_before_the_first_has_heard_of_its_end(
    make: Callable[..., Exchange],
) -> None:
    prefill, decode = pair(make)

    async def leave_twice() -> None:
        first = asyncio.create_task(decode.load(7, PEER, [98], PROMPT, [], [5]))
        await asyncio.sleep(0.1)
        decode.leave(7)
        second = asyncio.create_task(decode.load(7, PEER, [99], PROMPT, [], [6]))
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
        decode.connect(PEER, text)


def test_a_restarted_engine_is_another(make: Callable[..., Exchange]) -> None:
    prefill, decode = pair(make)
    number = prefill.offer(PROMPT, [], [1, 2, 3, 4])
    stated = decode._peers[PEER]
    decode._peers[PEER] = msgspec.structs.replace(stated, epoch="another")
    with pytest.raises(Refused, match="incarnation"):
        asyncio.run(decode.load(1, PEER, [number], PROMPT, [], [5]))


def test_without_a_time_nothing_starts(make: Callable[..., Exchange]) -> None:
    with pytest.raises(ConfigError) as caught:
        make(Fake("prefill", 16), seconds=0.0)
    assert caught.value.field == "kv.foreign_seconds"
