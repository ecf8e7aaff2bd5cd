"""Whatever happens in whatever order, a request ends in an answer or a typed error, and nothing of it is left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from aiohttp import web
from hypothesis import event, given, settings
from hypothesis import strategies as st

from deeplink.router import kind_vllm
from deeplink.router.parts import ADMISSION

from .fake_engine import CHUNKS, FakeEngine, answers, cut_short, dies, make_contract, running, stream
from .fake_kinds import KINDS, Cache, Kin
from .rig import Rig, check, rig, router, until

DEADLINE = 1.5
Outcome = Literal["well", "400", "500", "503", "dies", "empty", "cut", "torn stream", "silent"]
OUTCOMES: list[Outcome] = ["well", "well", "well", "400", "500", "503", "dies", "empty", "cut", "torn stream", "silent"]
WELL: list[Outcome] = ["well"] * 8
CODES = {"prefill_failed", "decode_failed", "no_engine", "overloaded", "peer_gone", "ticket_refused", None}


@dataclass
class Gated:
    """An engine whose answers wait until they are let through."""

    engine: FakeEngine
    outcomes: list[Outcome]
    state: str
    open: asyncio.Event = field(default_factory=asyncio.Event)
    restarts: bool = False

    def __post_init__(self) -> None:
        self.engine.answer = self._answer
        self.engine.state = self.state

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        outcome = self.outcomes[min(len(self.engine.calls), len(self.outcomes)) - 1]
        await self.open.wait()
        streamed = bool(self.engine.calls[-1].body.get("stream"))
        if outcome == "silent":
            await asyncio.sleep(60)
        if outcome == "torn stream" and streamed:
            return await stream(request, CHUNKS[:1], die=True)
        if outcome == "well" or outcome == "torn stream":
            if streamed:
                return await stream(request, CHUNKS)
            return web.json_response({"choices": [{"text": "hello"}]})
        by_name: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {
            "400": answers(400),
            "500": answers(500),
            "503": answers(503),
            "dies": dies,
            "empty": answers(200, b" "),
            "cut": cut_short,
        }
        return await by_name[outcome](request)


engines = st.builds(
    lambda outcomes, state: (outcomes, state),
    st.lists(st.sampled_from(OUTCOMES), min_size=1, max_size=3),
    st.sampled_from(["staged", "filling", "drained", "failed"]),
)


@pytest.fixture(autouse=True, scope="module")
def _impatient() -> Iterator[None]:
    """What reads a cache that was prefilled in vain may ask an engine that never answers, and is given up sooner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind_vllm, "SPEND_SECONDS", 1.0)
        yield


STEPS = ["p0", "p1", "d0", "d1", "leave", "restart p0", "restart d0", "tick"]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(engines, min_size=4, max_size=4),
    st.permutations(STEPS),
    st.integers(0, len(STEPS)),
    st.sampled_from(["sequential", "together"]),
    st.booleans(),
    st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
    st.integers(1, 3),
)
def test_every_order_of_events(
    scripts: list[tuple[list[Outcome], str]],
    steps: list[str],
    cut: int,
    dispatch: str,
    streamed: bool,
    sizes: tuple[int, int],
    clients: int,
) -> None:
    """`steps` happen one after the other, the first `cut` of them before all that is closed is opened."""

    async def test() -> None:
        names = [f"p{n}" for n in range(sizes[0])] + [f"d{n}" for n in range(sizes[1])]
        gated = {
            name: Gated(
                FakeEngine(name, make_contract("prefill" if name[0] == "p" else "decode")), list(outcomes), state
            )
            for name, (outcomes, state) in zip(names, scripts, strict=False)
        }
        made = [one.engine for one in gated.values()]
        async with rig(*made, deadline=DEADLINE, dispatch=dispatch, queue_seconds=0.5) as route:
            ask = {"prompt": "x", "stream": streamed}
            tasks = [asyncio.create_task(route.complete(ask)) for _ in range(clients)]
            left = False
            for number, step in enumerate(steps):
                if number == cut:
                    for one in gated.values():
                        one.open.set()
                if step in gated:
                    gated[step].open.set()
                elif step == "leave" and number < cut:
                    left = True
                    tasks[0].cancel()
                elif step.startswith("restart") and step[8:] in gated:
                    gated[step[8:]].engine.restart()
                await asyncio.sleep(0.01)
            for one in gated.values():
                one.open.set()
            done, late = await asyncio.wait(tasks, timeout=DEADLINE + 3)
            assert not late, "a request did not end"
            for task in done:
                if not task.cancelled():
                    judge(task.result(), streamed)
            event(f"left={left}")
            await nothing_is_left(route, made)

    check(test)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.lists(st.lists(st.sampled_from([*OUTCOMES, *WELL]), min_size=1, max_size=3), min_size=4, max_size=4),
    st.permutations(STEPS),
    st.integers(0, len(STEPS)),
    st.sampled_from(["sequential", "together"]),
    st.booleans(),
    st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
    st.integers(1, 3),
)
def test_every_order_of_events_at_engines_of_other_kinds(
    kind: str,
    scripts: list[list[Outcome]],
    steps: list[str],
    cut: int,
    dispatch: str,
    streamed: bool,
    sizes: tuple[int, int],
    clients: int,
) -> None:
    """As above. What was kept is read once or freed, nothing is read twice, and nobody prefills by itself."""

    async def test() -> None:
        names = [f"p{n}" for n in range(sizes[0])] + [f"d{n}" for n in range(sizes[1])]
        cache = Cache()
        kin = {name: Kin(name, kind, cache, list(script)) for name, script in zip(names, scripts, strict=False)}
        engines = [one.engine for one in kin.values()]
        async with running(*engines):
            for one in kin.values():
                one.point_at_itself()
            async with router(*engines, deadline=DEADLINE, dispatch=dispatch, queue_seconds=0.5) as route:
                ask = {"prompt": "x", "stream": streamed}
                tasks = [asyncio.create_task(route.complete(ask)) for _ in range(clients)]
                for number, step in enumerate(steps):
                    if number == cut:
                        for one in kin.values():
                            one.open.set()
                    if step in kin:
                        kin[step].open.set()
                    elif step == "leave" and number < cut:
                        tasks[0].cancel()
                    await asyncio.sleep(0.01)
                for one in kin.values():
                    one.open.set()
                done, late = await asyncio.wait(tasks, timeout=DEADLINE + 3)
                assert not late, "a request did not end"
                for task in done:
                    if not task.cancelled():
                        judge(task.result(), streamed)
                event(kind)
                await until(lambda: route.app[ADMISSION].load.idle)
                await until(lambda: all(call.cancelled or call.over for one in kin.values() for call in one.requests))
                await until(lambda: not cache.kept)
                assert not cache.wrong

    check(test)


def judge(got: Any, streamed: bool) -> None:
    event(f"status={got.status}")
    if got.status != 200:
        code = got.error.get("code")
        assert code in CODES or isinstance(code, int), got.data
    elif streamed:
        whole = got.data == b"".join(CHUNKS)
        broken = got.data.startswith(CHUNKS[0]) and b'"decode_failed"' in got.data and b"[DONE]" not in got.data
        assert whole or broken, got.data
    else:
        assert json.loads(got.data) == {"choices": [{"text": "hello"}]}


async def nothing_is_left(route: Rig, made: list[FakeEngine]) -> None:
    admission = route.app[ADMISSION]
    await until(lambda: admission.load.idle)
    await until(lambda: all(call.cancelled or call.over for engine in made for call in engine.calls))
    finished = {
        call.ticket.handoff
        for engine in made
        for call in engine.calls
        if engine.name[0] == "d" and call.well and "kv_transfer_params" in call.body
    }
    for engine in made:
        for call in engine.calls:
            if "kv_transfer_params" in call.body:
                name = call.ticket.handoff
                if name not in finished:
                    await until(lambda name=name, engine=engine: name in engine.deleted)  # type: ignore[misc]
