"""The operators' API and what is there to look at."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from .fake_engine import FakeEngine, answers, make_contract, running
from .rig import Rig, check, pair, rig, router, until

KEY = "admin-key-0123456789"
BEARER = {"Authorization": f"Bearer {KEY}"}
ASK = {"prompt": "x" * 40, "max_tokens": 5}


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "admin").write_text(KEY)
    return str(tmp_path / "admin")


@asynccontextmanager
async def admin(file: str, *engines: FakeEngine, **section: Any) -> AsyncIterator[Rig]:
    async with rig(*engines, admin_keys_file=file, **section) as route:
        yield route


async def call(route: Rig, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    async with route.client.request(method, f"{route.url}/deeplink/v1{path}", json=body, headers=BEARER) as response:
        data = await response.read()
        return response.status, json.loads(data) if data else None


def test_engines_are_listed(file: str) -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with admin(file, producer, consumer) as route:
            status, listed = await call(route, "GET", "/engines")
            assert status == 200
            assert [(one["name"], one["role"], one["up"]) for one in listed["engines"]] == [
                ("p", "prefill", True),
                ("d", "decode", True),
            ]
            assert (await call(route, "GET", "/engines/d"))[1]["epoch"] == consumer.contract.epoch
            assert (await call(route, "GET", "/engines/none"))[0] == 404

    check(test)


def test_a_drained_engine_ends_what_it_has_and_gets_nothing_new(file: str) -> None:
    async def test() -> None:
        one, other = FakeEngine("one", make_contract("both"), delay=0.3), FakeEngine("other", make_contract("both"))
        async with admin(file, one, other) as route:
            while not one.calls:
                running_there = asyncio.create_task(route.complete(ASK))
                await asyncio.sleep(0.05)
            status, state = await call(route, "POST", "/engines/one/drain")
            assert (status, state["draining"], state["requests"]) == (200, True, 1)
            assert state["tokens"] == {"prefill": 10, "decode": 15}
            for _ in range(4):
                assert (await route.complete(ASK)).headers["x-deeplink-decode"] == "other"
            assert (await running_there).status == 200
            assert (await call(route, "GET", "/engines/one"))[1]["requests"] == 0
            assert (await call(route, "POST", "/engines/other/drain"))[0] == 200
            got = await route.complete(ASK)
            assert (got.status, got.error["code"]) == (503, "no_engine")
            assert "draining" in got.error["message"]
            assert (await route.get("/health")).status == 503
            assert (await call(route, "DELETE", "/engines/one/drain"))[1]["draining"] is False
            assert (await route.complete(ASK)).headers["x-deeplink-decode"] == "one"

    check(test)


def test_a_rolling_restart_without_an_error(file: str) -> None:
    async def test() -> None:
        engines = [
            FakeEngine(name, make_contract("prefill" if name < "c" else "decode"), delay=0.02) for name in "abcd"
        ]
        async with admin(file, *engines, poll=0.05) as route:
            stop = False
            statuses: list[int] = []

            async def ask() -> None:
                while not stop:
                    statuses.append((await route.complete(ASK)).status)

            clients = [asyncio.create_task(ask()) for _ in range(4)]
            for engine in engines:
                await call(route, "POST", f"/engines/{engine.name}/drain")
                while (await call(route, "GET", f"/engines/{engine.name}"))[1]["requests"]:
                    await asyncio.sleep(0.01)
                await engine.stop()
                engine.restart()
                await engine.start()
                while (await call(route, "GET", f"/engines/{engine.name}"))[1]["epoch"] != engine.contract.epoch:
                    await asyncio.sleep(0.01)
                await call(route, "DELETE", f"/engines/{engine.name}/drain")
            stop = True
            await asyncio.gather(*clients)
            assert set(statuses) == {200}
            assert len(statuses) >= 12

    check(test)


def test_engines_come_and_go(file: str) -> None:
    async def test() -> None:
        one, other = FakeEngine("one", make_contract("both")), FakeEngine("other", make_contract("both"))
        async with running(one, other), router(one, admin_keys_file=file) as route:
            entry = {"url": other.url, "control": other.control, "weight": 2}
            status, state = await call(route, "PUT", "/engines/other", entry)
            assert (status, state["up"], state["weight"]) == (200, True, 2)
            assert await call(route, "PUT", "/engines/other", entry) == (200, state)
            assert (await call(route, "DELETE", "/engines/one"))[0] == 204
            assert (await call(route, "DELETE", "/engines/one"))[0] == 404
            assert (await route.complete(ASK)).headers["x-deeplink-decode"] == "other"
            # It has moved.
            status, state = await call(route, "PUT", "/engines/other", {"url": one.url, "control": one.control})
            assert state["epoch"] == one.contract.epoch

    check(test)


@pytest.mark.parametrize("body", [None, [], {}, {"url": "nonsense"}, {"url": "http://h:1", "extra": 1}])
def test_what_is_no_engine_is_refused(file: str, body: Any) -> None:
    async def test() -> None:
        async with admin(file, FakeEngine("one", make_contract("both"))) as route:
            status, answer = await call(route, "PUT", "/engines/other", body)
            assert (status, answer["error"]["code"]) == (400, "invalid_request")
            status, _ = await call(route, "PUT", "/engines/other", {"url": "http://h:1", "name": "another"})
            assert status == 400

    check(test)


def samples(text: bytes) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^([^#\s]+(?:\{[^}]*\})?) (\S+)$", text.decode(), re.M)}


def test_metrics() -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with rig(producer, consumer) as route:
            await route.complete(ASK)
            await route.complete(ASK | {"n": 2})
            producer.answer = answers(500)
            await route.complete(ASK)
            await route.complete(data=b"{")
            got = await route.get("/metrics")
            assert got.headers["Content-Type"].startswith("text/plain")
            seen = samples(got.data)
            assert seen['deeplink_requests_total{path="handoff",status="200"}'] == 1
            assert seen['deeplink_requests_total{path="plain",status="200"}'] == 1
            assert seen['deeplink_requests_total{path="handoff",status="502"}'] == 1
            assert seen['deeplink_errors_total{code="prefill_failed"}'] == 1
            assert seen['deeplink_requests_total{path="none",status="400"}'] == 1
            assert seen['deeplink_handoffs_total{decode="d",end="done",prefill="p"}'] == 1
            assert seen['deeplink_handoffs_total{decode="d",end="cancelled",prefill="p"}'] == 1
            assert seen['deeplink_first_byte_seconds_count{path="handoff"}'] == 1
            assert seen['deeplink_request_seconds_count{path="handoff"}'] == 2
            assert seen['deeplink_engine_up{engine="p",role="prefill"}'] == 1
            assert seen['deeplink_engine_requests{engine="p"}'] == 0
            assert seen["deeplink_queue"] == 0

    check(test)


def test_metrics_say_what_is_at_the_engines_now() -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"), delay=0.3)
        engine.held = 95
        async with rig(engine, kv_limit=0.96) as route:
            task = asyncio.create_task(route.complete(ASK))
            await until(lambda: engine.calls)
            seen = samples((await route.get("/metrics")).data)
            assert seen['deeplink_engine_tokens{engine="e",work="prefill"}'] == 10
            assert seen['deeplink_engine_tokens{engine="e",work="decode"}'] == 15
            assert seen['deeplink_engine_kv_use{engine="e"}'] == 0.95
            assert seen['deeplink_engine_takes_requests{engine="e"}'] == 1
            await task

    check(test)


def test_the_dashboard_shows_metrics_that_exist() -> None:
    """Every metric named in the Grafana dashboard is one of the router's."""

    async def test() -> None:
        async with rig(*pair()) as route:
            await route.complete(ASK)
            text = (await route.get("/metrics")).data.decode()
            exist = set(re.findall(r"^# TYPE (\S+)", text, re.M))
            named = set(re.findall(r"deeplink_[a-z_]+", dashboard.read_text()))
            assert named
            for name in named:
                assert re.sub("_(bucket|sum|count)$", "", name) in exist, name

    dashboard = Path(__file__).parents[2] / "deploy" / "grafana" / "router.json"
    check(test)
