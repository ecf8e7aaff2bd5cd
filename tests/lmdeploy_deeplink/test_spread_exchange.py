"""Migrations of engines that are spread over processes, here all in one: workers, channels and caches are real."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cache import Fake, FakeStated
from loopback import SECRET
from world import read

from deeplink import config
from deeplink.config import VARIABLE
from deeplink.errors import (
    Aborted,
    DeadlineExceeded,
    DeeplinkError,
    HandoffError,
    PeerGone,
    Refused,
    TicketRefused,
)
from deeplink.kvconnector.caches.group import Group
from deeplink.kvconnector.contracts import contract as co
from deeplink.kvconnector.contracts.negotiate import Agreement, negotiate
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.handoffs.first_token import FirstToken
from lmdeploy_deeplink.migration import adapter, exchange
from lmdeploy_deeplink.migration.adapter import Place
from lmdeploy_deeplink.migration.exchange import Exchange
from lmdeploy_deeplink.migration.forwards import Forwards, SpreadForwards
from lmdeploy_deeplink.migration.part import Part
from lmdeploy_deeplink.migration.spread import Spread
from lmdeploy_deeplink.migration.worker import Worker

PROMPT = list(range(50))
FIRST = FirstToken(7, -0.5, ((7, -0.5), (8, -1.5)))
THEIRS, OURS = [7, 2, 9, 4], [5]
TILE = 3 * 2 * 32 * 2 * 16
"""Bytes of 16 tokens of one head."""


class InThisProcess:
    """Workers whose calls come in the order in which they were made, but for those that are `held` by their names until
    `release`. The one at `gone` has gone."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.gone: int | None = None
        self.held: set[str] = set()
        self._released = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    def release(self) -> None:
        self._released.set()

    def call(self, method: str, *arguments: Any) -> list[Awaitable[Any]]:
        return [self._called(rank, method, arguments) for rank in range(len(self.workers))]

    def tell(self, method: str, *arguments: Any) -> None:
        for worker in self.workers:
            finished(getattr(worker, method)(*arguments))

    def ask(self, method: str, *arguments: Any) -> None:
        self.tell(method, *arguments)

    async def _called(self, rank: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method in self.held:
            await asyncio.wait_for(self._released.wait(), 10)
        if rank == self.gone:
            raise PeerGone("a worker has gone")
        return await getattr(self.workers[rank], method)(*arguments)


def finished(work: Coroutine[Any, Any, None]) -> None:
    """None of those that are not waited for wait themselves."""
    with pytest.raises(StopIteration):
        work.send(None)


class Side:
    def __init__(self, fake: Fake, processes: int) -> None:
        self.groups = [fake.group(Place(rank, processes)) for rank in range(processes)]
        self.parts: list[Part] = []
        self.forwards = [Forwards() for _ in range(processes)]
        self.exchange = Exchange(fake, "model", self._spread if processes > 1 else None)
        self.parts = self.parts or [self.exchange._part]  # type: ignore[list-item]

    def _spread(self, stated: Any, epoch: str) -> Spread:
        for rank, group in enumerate(self.groups):
            self.parts.append(self._part(stated, epoch, Place(rank, len(self.groups)), group))
        made = [Worker(part, forwards) for part, forwards in zip(self.parts, self.forwards, strict=True)]
        self.workers = InThisProcess(made)
        return Spread(self.workers, [co.decode(one.contract) for one in made])

    def _part(self, stated: Any, epoch: str, place: Place, group: Group) -> Part:
        return Part(
            config.load(None).kv,
            SECRET,
            epoch,
            lambda _: group,
            lambda group, *where: stated.contract(group, place, epoch, *where),
            place.rank,
        )

    def kv(self, table: list[int], tokens: int = len(PROMPT)) -> np.ndarray[Any, Any]:
        """Of all heads."""
        return np.concatenate([read((group,), 0, table, 0, tokens) for group in self.groups], axis=2)

    @property
    def held(self) -> list[tuple[int, int, int]]:
        ends = [part.endpoint for part in self.parts]
        return [(one._outgoing.used, one._incoming.used, one._ledger.open) for one in ends]

    def admit(self, side: str, text: str) -> tickets.Ticket:
        return self.exchange.admit(side, text)


Make = Callable[..., tuple[Side, Side]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    """`make(2, 1)`: a prefill engine of two processes and a decode engine of one."""
    started: list[Side] = []
    monkeypatch.setattr(adapter, "check_supported", lambda _: None)
    monkeypatch.setattr(adapter, "read_group", lambda *_: started_by[0].groups[0])
    monkeypatch.setattr(adapter, "read_model", lambda engine, _: engine.model())
    monkeypatch.setattr(adapter, "stated", lambda engine, model: FakeStated(engine.role, model))
    monkeypatch.setattr(exchange.shared, "load", lambda _: SECRET)
    started_by: list[Side] = []

    class Started(Side):
        def __init__(self, fake: Fake, processes: int) -> None:
            started_by[:] = [self]
            super().__init__(fake, processes)

    def pair(produce: int, consume: int, staging: int = 4 << 20, foreign: float = 0.0) -> tuple[Side, Side]:
        file = tmp_path / "deeplink.toml"
        file.write_text(f"[kv]\nstaging = {staging}\nforeign_seconds = {foreign}\n")
        monkeypatch.setenv(VARIABLE, str(file))
        made = Started(Fake("prefill", 16), produce), Started(Fake("decode", 64), consume)
        started.extend(made)
        return made

    yield pair
    for one in started:
        one.exchange.close()


def ticket(prefill: Side, decode: Side, milliseconds: int = 30_000) -> str:
    """As deeplink's router makes it."""
    ours, theirs = (one.exchange._part.contract for one in (prefill, decode))
    agreement = negotiate(ours, theirs)
    assert isinstance(agreement, Agreement)
    return tickets.mint(tickets.issue(tickets.new_handoff(), ours, theirs, agreement, milliseconds), SECRET)


def offer(prefill: Side, text: str, table: list[int] = THEIRS) -> str:
    admitted = prefill.admit("produce", text)
    prefill.exchange.offer(admitted, PROMPT, [], table, FIRST)
    return admitted.handoff


def loading(decode: Side, text: str, session: int = 1, table: list[int] = OURS) -> asyncio.Task[FirstToken]:
    work = decode.exchange.load(session, decode.admit("consume", text), PROMPT, [], table)
    return asyncio.get_running_loop().create_task(asyncio.wait_for(work, 20))


async def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def quiet(*sides: Side) -> None:
    await until(lambda: not any(sum(held) for side in sides for held in side.held))


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


ALL = pytest.mark.parametrize(("produce", "consume"), [(1, 2), (2, 1), (2, 2)])


@ALL
def test_every_byte_arrives(make: Make, produce: int, consume: int) -> None:
    async def hand_over() -> None:
        prefill, decode = make(produce, consume)
        text = ticket(prefill, decode)
        name = offer(prefill, text)
        assert await loading(decode, text) == FIRST
        assert np.array_equal(decode.kv(OURS), prefill.kv(THEIRS))
        await until(lambda: prefill.exchange.settled(name))
        await quiet(prefill, decode)

    run(hand_over())


def test_blocks_are_kept_until_every_process_has_staged_its_part(make: Make) -> None:
    async def fill() -> None:
        prefill, decode = make(2, 2, staging=12 * TILE)  # of which a chunk is half
        texts = [ticket(prefill, decode) for _ in range(2)]
        first, second = offer(prefill, texts[0]), offer(prefill, texts[1], [10, 11, 12, 13])
        await until(lambda: prefill.exchange.settled(first))
        await asyncio.sleep(0.1)
        assert not prefill.exchange.settled(second)
        await loading(decode, texts[0])
        await until(lambda: prefill.exchange.settled(second))
        await loading(decode, texts[1], 2, [6])
        assert np.array_equal(decode.kv([6]), prefill.kv([10, 11, 12, 13]))
        await quiet(prefill, decode)

    run(fill())


def test_an_offer_is_not_settled_before_its_workers_have_heard_of_it(make: Make) -> None:
    async def late() -> None:
        prefill, decode = make(2, 1)
        prefill.workers.held = {"offer"}
        text = ticket(prefill, decode)
        name = offer(prefill, text)
        await asyncio.sleep(0.05)
        assert not prefill.exchange.settled(name)
        prefill.workers.release()
        await loading(decode, text)
        await until(lambda: prefill.exchange.settled(name))

    run(late())


def test_a_dropped_offer_that_comes_later_reads_nothing(make: Make) -> None:
    async def late() -> None:
        prefill, decode = make(2, 1)
        prefill.workers.held = {"offer"}
        text = ticket(prefill, decode)
        name = offer(prefill, text)
        await asyncio.sleep(0)
        prefill.exchange.drop(name)
        prefill.workers.release()
        await until(lambda: prefill.exchange.settled(name))
        await quiet(prefill)
        with pytest.raises(TicketRefused, match="given up"):
            await loading(decode, text)

    run(late())


@ALL
def test_who_leaves_ends_the_load_in_all_processes(make: Make, produce: int, consume: int) -> None:
    """It waits for an offer that does not come; the blocks are another's as soon as `leave` returns."""

    async def leave() -> None:
        prefill, decode = make(produce, consume)
        before = decode.kv(OURS)
        text = ticket(prefill, decode)
        load = loading(decode, text)
        await asyncio.sleep(0.1)
        decode.exchange.leave(1)
        name = offer(prefill, text)
        with pytest.raises(HandoffError, match="given up"):
            await load
        await asyncio.sleep(0.1)
        assert np.array_equal(decode.kv(OURS), before)
        prefill.exchange.drop(name)
        await quiet(prefill, decode)

    run(leave())


def test_a_load_that_comes_after_its_cancel_writes_nothing(make: Make) -> None:
    async def late() -> None:
        prefill, decode = make(1, 2)
        before = decode.kv(OURS)
        decode.workers.held = {"load"}
        text = ticket(prefill, decode)
        offer(prefill, text)
        load = loading(decode, text)
        await asyncio.sleep(0.05)
        decode.exchange.leave(1)
        decode.workers.release()
        with pytest.raises(Aborted):
            await load
        await asyncio.sleep(0.1)
        assert np.array_equal(decode.kv(OURS), before)
        assert not any(worker._cancelled for worker in decode.workers.workers)
        assert not decode.exchange._part._cancelled | decode.exchange._part._loading  # type: ignore[union-attr]
        await quiet(decode)

    run(late())


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_process_does_not_have_is_not_taken_from_the_others(make: Make, rank: int) -> None:
    async def part() -> None:
        prefill, decode = make(2, 2)
        text = ticket(prefill, decode)
        name = tickets.verify(text, SECRET).handoff
        prefill.parts[rank].withhold(name, TicketRefused("not this").reason())
        offer(prefill, text)
        with pytest.raises(DeeplinkError, match=r"not this|opened before"):
            await loading(decode, text)
        await until(lambda: prefill.exchange.settled(name))
        prefill.exchange.drop(name)
        await quiet(prefill, decode)
        again = ticket(prefill, decode)
        offer(prefill, again)
        await loading(decode, again)
        assert np.array_equal(decode.kv(OURS), prefill.kv(THEIRS))

    run(part())


def test_a_process_that_has_gone(make: Make) -> None:
    async def gone() -> None:
        prefill, decode = make(1, 2)
        decode.workers.gone = 1
        text = ticket(prefill, decode)
        with pytest.raises(PeerGone):
            await loading(decode, text)
        await quiet(decode)

    run(gone())


def test_a_request_that_is_sent_twice_is_loaded_once(make: Make) -> None:
    async def twice() -> None:
        prefill, decode = make(2, 2)
        text = ticket(prefill, decode)
        offer(prefill, text)
        loads = [loading(decode, text, session, [4 + session]) for session in (1, 2)]
        first, second = await asyncio.gather(*loads, return_exceptions=True)
        assert first == FIRST
        assert isinstance(second, DeeplinkError)
        assert np.array_equal(decode.kv([5]), prefill.kv(THEIRS))
        await quiet(prefill, decode)

    run(twice())


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_after_its_end_nothing_is_handed_over(make: Make, side: str) -> None:
    async def ended() -> None:
        prefill, decode = make(2, 2)
        text = ticket(prefill, decode, 2000)
        offer(prefill, text)
        (prefill if side == "prefill" else decode).exchange.end("other weights")
        with pytest.raises(HandoffError):
            await loading(decode, text)

    run(ended())


@pytest.mark.parametrize(("produce", "consume"), [(1, 2), (2, 1)])
def test_lmdeploys_router_pairs_only_engines_of_one_process(make: Make, produce: int, consume: int) -> None:
    prefill, decode = make(produce, consume, foreign=30)
    one, several = (prefill, decode) if produce == 1 else (decode, prefill)
    description = one.exchange.foreign.describe()
    for refused in (
        several.exchange.foreign.describe,
        several.exchange.foreign.to_offer,
        lambda: several.exchange.foreign.connect("peer", description),
    ):
        with pytest.raises(Refused) as caught:
            refused()
        assert (caught.value.field, caught.value.theirs) == ("tp", "2")


def test_forwards_are_over_when_they_are_in_all_processes(make: Make) -> None:
    async def wait() -> None:
        _, decode = make(1, 2)
        forwards = SpreadForwards(decode.workers)
        await forwards.passed(0.1)
        forwards.send()
        waiting = asyncio.create_task(forwards.passed(10))
        forwards.send()
        decode.forwards[0].end()
        await asyncio.sleep(0.05)
        assert not waiting.done()
        decode.forwards[1].end()
        await asyncio.sleep(0.05)
        assert not waiting.done()  # the second was sent before it came to wait
        for one in decode.forwards:
            one.end()
        await waiting

    run(wait())


def test_forwards_that_do_not_end_in_one_process(make: Make) -> None:
    async def wait() -> None:
        _, decode = make(1, 2)
        forwards = SpreadForwards(decode.workers)
        forwards.send()
        decode.forwards[0].end()
        with pytest.raises(DeadlineExceeded):
            await forwards.passed(0.05)

    run(wait())
