"""Several routers and one Redis: what one knows the others know, and without it each goes on."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("redis")
SERVER = shutil.which("redis-server")
if SERVER is None:
    pytest.skip("there is no redis-server here", allow_module_level=True)

from redis.asyncio import Redis  # noqa: E402

from deeplink import secret as secrets  # noqa: E402
from deeplink.router import shared  # noqa: E402
from deeplink.router.parts import ADMISSION, FLEET, SHARED  # noqa: E402

from .fake_engine import SECRET, FakeEngine, make_contract, running  # noqa: E402
from .rig import Rig, check, router, until  # noqa: E402
from .worker_rig import Running, workers  # noqa: E402

ENGINES = {"Authorization": f"Bearer {secrets.control_token(SECRET)}"}
KEY = "admin-key-0123456789"
OPERATOR = {"Authorization": f"Bearer {KEY}"}


class Server:
    """A Redis that keeps nothing on disk."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.folder = folder
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        assert SERVER is not None
        arguments = ["--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly", "no"]
        self.process = await asyncio.create_subprocess_exec(
            SERVER, *arguments, cwd=self.folder, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        await until(self.socket.exists)

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
            await asyncio.wait_for(self.process.wait(), 5)
            self.socket.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "TICK", 0.03)
    monkeypatch.setattr(shared, "SETTLE", 0.3)


@asynccontextmanager
async def routers(folder: Path, *engines: FakeEngine, count: int = 2, **section: Any) -> AsyncIterator[Any]:
    (folder / "admin").write_text(KEY)
    server = Server(folder)
    await server.start()
    try:
        async with AsyncExitStack() as stack:
            more = {"redis": server.url, "admin_keys_file": str(folder / "admin")} | section
            made = [await stack.enter_async_context(router(*engines, **more)) for _ in range(count)]
            await until(lambda: all(route.app[SHARED].reached for route in made))
            yield server, *made
    finally:
        await server.kill()


async def register(route: Rig, engine: FakeEngine, seconds: float = 30.0, sequence: int = 0, status: int = 200) -> None:
    url = f"{route.url}/deeplink/v1/registrations/{engine.name}"
    body = {"url": engine.url, "control": engine.control, "epoch": engine.contract.epoch, "seconds": seconds}
    async with route.client.put(url, json=body | {"sequence": sequence}, headers=ENGINES) as response:
        assert response.status == status, await response.read()


async def leave(route: Rig, engine: FakeEngine, sequence: int | None = None) -> None:
    more = "" if sequence is None else f"?epoch={engine.contract.epoch}&sequence={sequence}"
    url = f"{route.url}/deeplink/v1/registrations/{engine.name}{more}"
    async with route.client.delete(url, headers=ENGINES) as response:
        assert response.status == 204


async def operate(route: Rig, method: str, path: str, body: Any = None) -> int:
    url = f"{route.url}/deeplink/v1/engines/{path}"
    async with route.client.request(method, url, json=body, headers=OPERATOR) as response:
        status: int = response.status
        return status


def names(route: Rig) -> set[str]:
    return {engine.name for engine in route.app[FLEET].table.engines if not engine.down}


def test_an_engine_that_registers_at_one_serves_at_all(tmp_path: Path) -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with running(engine), routers(tmp_path) as (_, one, other):
            await register(one, engine)
            await until(lambda: names(other) == {"e"})
            assert (await other.complete({"prompt": "x"})).status == 200
            await register(other, engine)  # heartbeats may go to any of them
            await leave(one, engine)
            await until(lambda: not names(one) and not names(other))

    check(test)


@pytest.mark.parametrize("told", [3, None])
def test_a_heartbeat_that_is_told_after_the_farewell_brings_nobody_back(tmp_path: Path, told: int | None) -> None:
    """They go to different routers, and the one that heard the heartbeat may be the last to tell."""

    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with running(engine), routers(tmp_path) as (_, one, other):
            await register(one, engine, sequence=1)
            await until(lambda: names(other) == {"e"})
            for sequence in (2, 3):
                await register(one, engine, sequence=sequence)
                await register(other, engine, sequence=sequence)
            await leave(one, engine, told)
            await register(other, engine, sequence=3, status=200)  # it was on its way; the farewell is not known there
            await until(lambda: not names(one) and not names(other))
            for _ in range(10):
                await asyncio.sleep(shared.TICK)
                assert not names(one) | names(other)
            for route in (one, other):
                await register(route, engine, sequence=3, status=400)

    check(test)


def test_who_comes_back_is_there_again_everywhere(tmp_path: Path) -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with running(engine), routers(tmp_path) as (_, one, other):
            await register(one, engine, sequence=1)
            await until(lambda: names(other) == {"e"})
            await leave(one, engine, 1)
            await until(lambda: not names(one) and not names(other))
            await register(other, engine, sequence=2)
            await until(lambda: names(one) == names(other) == {"e"})
            await leave(other, engine, 2)
            await until(lambda: not names(one) and not names(other))
            engine.restart()
            await register(one, engine, sequence=1)
            await until(lambda: names(one) == names(other) == {"e"})
            for _ in range(10):
                await asyncio.sleep(shared.TICK)
                assert names(one) == names(other) == {"e"}

    check(test)


def test_an_engine_that_falls_silent_is_gone_everywhere_and_not_before(tmp_path: Path) -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with running(engine), routers(tmp_path) as (_, one, other):
            await register(one, engine, 0.8)
            await until(lambda: names(other) == {"e"})
            for _ in range(10):  # only the other hears of it now
                await register(other, engine, 0.8)
                await asyncio.sleep(0.12)
                assert names(one) == names(other) == {"e"}
            await until(lambda: not names(one) and not names(other))

    check(test)


def test_operators_add_drain_and_remove_for_all(tmp_path: Path) -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with running(engine), routers(tmp_path) as (_, one, other):
            assert await operate(one, "PUT", "e", {"url": engine.url, "control": engine.control}) == 200
            await until(lambda: names(other) == {"e"})
            assert await operate(other, "POST", "e/drain") == 200
            await until(lambda: one.app[ADMISSION].draining == {"e"})
            assert (await one.complete({"prompt": "x"})).status == 503
            assert await operate(one, "DELETE", "e/drain") == 200
            await until(lambda: not other.app[ADMISSION].draining)
            assert (await other.complete({"prompt": "x"})).status == 200
            assert await operate(other, "DELETE", "e") == 204
            await until(lambda: not names(one) and not names(other))

    check(test)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="who the workers are is read from /proc")
def test_a_router_with_workers_shares_as_one(tmp_path: Path) -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        folder = tmp_path / "several"
        folder.mkdir()
        async with running(engine), routers(tmp_path, count=1) as (server, one), workers(folder, redis=server.url) as w:
            await w.complete()
            assert await operate(one, "PUT", "e", {"url": engine.url, "control": engine.control}) == 200
            await serves(w, 200)
            assert await w.operate("POST", "e/drain") == 200
            await until(lambda: one.app[ADMISSION].draining == {"e"})
            assert await operate(one, "DELETE", "e/drain") == 200
            await serves(w, 200)
            engine.delay = 30
            tasks = [asyncio.create_task(w.ask()) for _ in range(3)]
            await until(lambda: one.app[ADMISSION].load.all("e")[2] == 3)
            for task in tasks:
                task.cancel()
            await until(lambda: not any(one.app[ADMISSION].load.all("e")))
            engine.delay = 0
            assert await operate(one, "DELETE", "e") == 204
            await serves(w, 503)

    check(test)


async def serves(route: Running, status: int) -> None:
    """Until that is every worker's answer."""
    for worker in route.workers:
        async with route.only(worker):
            end = time.monotonic() + 5
            while (await route.ask())[0] != status:
                assert time.monotonic() < end, "it did not happen in time"
                await asyncio.sleep(0.05)


def test_each_counts_what_the_others_have_given(tmp_path: Path) -> None:
    async def test() -> None:
        engines = [FakeEngine(name, make_contract("both"), delay=30) for name in "ab"]
        async with running(*engines), routers(tmp_path, *engines) as (_, one, other):
            tasks = []
            for _ in range(8):
                route = one if len(tasks) % 2 else other
                tasks.append(asyncio.create_task(route.complete({"prompt": "x" * 400})))
                total = len(tasks)
                await until(lambda total=total: sum(len(engine.calls) for engine in engines) == total)
                await until(
                    lambda total=total: all(
                        sum(r.app[ADMISSION].load.all(name)[2] for name in "ab") == total for r in (one, other)
                    )
                )
            assert [len(engine.calls) for engine in engines] == [4, 4]
            for task in tasks:
                task.cancel()
            await until(lambda: not any(any(r.app[ADMISSION].load.all(name)) for name in "ab" for r in (one, other)))

    check(test)


def test_a_redis_that_dies_fails_no_request_and_one_that_comes_back_is_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "STALE", 0.3)

    async def test() -> None:
        engines = [FakeEngine(name, make_contract("both"), delay=0.002) for name in "abc"]
        async with running(*engines), routers(tmp_path, engines[0]) as (server, one, other):
            await register(one, engines[1])
            assert await operate(other, "PUT", "c", {"url": engines[2].url, "control": engines[2].control}) == 200
            await until(lambda: names(one) == names(other) == set("abc"))
            numbers = list(range(300))
            statuses = []

            async def client(route: Rig) -> None:
                while numbers:
                    numbers.pop()
                    statuses.append((await route.complete({"prompt": "x"})).status)
                    if len(statuses) == 100:
                        await server.kill()

            await asyncio.gather(*(client(route) for route in (one, other) for _ in range(4)))
            assert statuses == [200] * len(statuses)
            await until(lambda: not one.app[SHARED].reached and not other.app[SHARED].reached)
            assert names(one) == names(other) == set("abc")
            await until(lambda: not one.app[ADMISSION].load.others and not other.app[ADMISSION].load.others)
            late = FakeEngine("late", make_contract("both"))
            async with running(late):
                await register(one, late)
                assert names(other) == set("abc")
                await server.start()
                await until(lambda: names(other) == {*"abc", "late"})
                await asyncio.sleep(0.5)
                assert names(one) == names(other) == {*"abc", "late"}

    check(test)


def test_a_redis_that_is_killed_at_random_fails_none_of_a_thousand_requests(tmp_path: Path) -> None:
    """And nothing is left of their load at any router."""
    dice = random.Random("redis")

    async def test() -> None:
        engines = [FakeEngine(name, make_contract("both"), delay=0.005) for name in "ab"]
        async with running(*engines), routers(tmp_path, *engines) as (server, one, other):
            numbers, killed = list(range(1000)), 0

            async def client(route: Rig) -> None:
                while numbers:
                    numbers.pop()
                    assert (await route.complete({"prompt": "x"})).status == 200

            async def killer() -> None:
                nonlocal killed
                while numbers:
                    await asyncio.sleep(dice.uniform(0.02, 0.2))
                    await server.kill()
                    killed += 1
                    await asyncio.sleep(dice.uniform(0.0, 0.2))
                    await server.start()

            await asyncio.gather(killer(), *(client(route) for route in (one, other) for _ in range(8)))
            assert killed > 1
            await until(lambda: not any(any(r.app[ADMISSION].load.all(name)) for name in "ab" for r in (one, other)))

    check(test)


def test_what_others_write_into_redis_is_not_believed(tmp_path: Path) -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with running(engine), routers(tmp_path) as (server, one, other):
            await register(one, engine)
            await until(lambda: names(other) == {"e"})
            async with Redis.from_url(server.url) as client:
                sealed = await client.hget("deeplink:engines", "e")
                # Another's value under another name, one that was changed, and one that was never sealed.
                await client.hset("deeplink:engines", "copied", sealed)
                await client.hset("deeplink:engines", "changed", sealed[:-1] + b"x")
                await client.hset("deeplink:engines", "bare", b"x" * 100)
                await client.hset("deeplink:draining", "e", b"1")
                await client.hset("deeplink:load", "evil", b"y" * 100_000)
                await asyncio.sleep(0.3)
            assert names(one) == names(other) == {"e"}
            assert not one.app[ADMISSION].draining
            assert (await one.complete({"prompt": "x"})).status == 200

    check(test)


def test_what_a_router_that_was_killed_left_is_no_load_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "STALE", 0.2)
    monkeypatch.setattr(shared, "FORGET", 0.6)

    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with (
            running(engine),
            routers(tmp_path, engine) as (server, one, other),
            Redis.from_url(server.url) as client,
        ):
            dead = shared.Shared("", SECRET, one.app[FLEET], one.app[ADMISSION], name="dead")
            counts = msgspec.msgpack.encode((1.0, {"e": (7, 8, 9)}))
            await client.hset("deeplink:load", "dead", dead._sealed("dead", counts))
            await until(lambda: one.app[ADMISSION].load.all("e") == (7, 8, 9))
            await until(lambda: other.app[ADMISSION].load.all("e") == (0, 0, 0))
            for _ in range(300):
                if not await client.hexists("deeplink:load", "dead"):
                    break
                await asyncio.sleep(0.01)
            assert set(await client.hkeys("deeplink:load")) == {
                route.app[SHARED].name.encode() for route in (one, other)
            }

    check(test)


def test_a_router_that_starts_before_redis_serves_and_finds_it_later(tmp_path: Path) -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        server = Server(tmp_path)
        async with running(engine), router(engine, redis=server.url) as route:
            assert (await route.complete({"prompt": "x"})).status == 200
            assert not route.app[SHARED].reached
            await server.start()
            try:
                await until(lambda: route.app[SHARED].reached)
            finally:
                await server.kill()

    check(test)
