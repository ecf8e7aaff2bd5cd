"""The engines' side of the registration, `kvconnector.registration`, against a real router."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from deeplink import config as configs
from deeplink.errors import ConfigError
from deeplink.kvconnector import registration
from deeplink.kvconnector.registration import Presence, Registration
from deeplink.router.app import make_app
from deeplink.router.parts import FLEET, REGISTERED
from deeplink.router.serve import serving

from .fake_engine import SECRET, FakeEngine, make_contract, running
from .rig import check, until

KEY = "an operator's key"


class RouterAt:
    """A router on a port that it can come back to."""

    def __init__(self, folder: Any) -> None:
        keys = folder / "keys"
        keys.write_text(KEY)
        self._keys = str(keys)
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self.port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def up(self, secret: bytes = SECRET) -> AsyncIterator[web.Application]:
        section = {"port": self.port, "poll": 60.0, "admin_keys_file": self._keys}
        config = configs.parse({"router": section}, "test")
        app = make_app(config, secret)
        async with serving(app, config.router, shutdown=1.0):
            yield app

    async def engines(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as client,
            client.get(f"{self.url}/deeplink/v1/engines", headers=headers) as answer,
        ):
            return {engine["name"]: engine for engine in json.loads(await answer.read())["engines"]}

    async def has(self, name: str, seconds: float = 10.0) -> dict[str, Any]:
        """Its entry for an engine, as soon as there is one that is up."""

        async def look() -> dict[str, Any]:
            while not (found := (await self.engines()).get(name, {})).get("up"):
                await asyncio.sleep(0.02)
            return found

        return await asyncio.wait_for(look(), seconds)


@pytest.fixture
def at(tmp_path: Any) -> RouterAt:
    return RouterAt(tmp_path)


def presence(engine: FakeEngine, seconds: float = 6.0) -> Presence:
    return Presence("rack 1/e", engine.url, engine.control, engine.contract.epoch, seconds)


@asynccontextmanager
async def registered(
    at: RouterAt, engine: FakeEngine, secret: bytes = SECRET, seconds: float = 6.0
) -> AsyncIterator[Registration]:
    made = Registration(at.url + "/", presence(engine, seconds), secret)
    made.start()
    try:
        yield made
    finally:
        await asyncio.to_thread(made.close)


def test_it_comes_stays_and_goes(at: RouterAt) -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with running(engine), at.up() as app:
            async with registered(at, engine, seconds=1.5):
                found = await at.has("rack 1/e")
                assert (found["url"], found["control"]) == (engine.url, engine.control)
                assert found["epoch"] == engine.contract.epoch
                until_ = app[REGISTERED]._until
                first = until_["rack 1/e"]
                await until(lambda: until_.get("rack 1/e", 0.0) > first + 1.5)  # longer than one heartbeat holds
            assert await at.engines() == {}

    check(test)


def test_data_parallel_ranks_are_engines_of_their_own(at: RouterAt) -> None:
    """Behind one address; each request says which it is for."""

    async def test() -> None:
        one, two = (FakeEngine(name, make_contract("both")) for name in "ab")
        second = msgspec.structs.replace(two.contract.ranks[0], dp=1)
        two.contract = msgspec.structs.replace(two.contract, ranks=(second,))
        async with running(one, two), at.up() as app:
            made = [
                Registration(at.url, Presence("r", one.url, each.control, each.contract.epoch, rank=rank), SECRET)
                for rank, each in enumerate((one, two))
            ]
            for registration in made:
                registration.start()
            for rank, each in enumerate((one, two)):
                found = await at.has(f"r/{rank}")
                assert (found["url"], found["control"]) == (one.url, each.control)
            ranks = {engine.name: engine.rank for engine in app[FLEET].table.engines}
            assert ranks == {"r/0": 0, "r/1": 1}
            for registration in made:
                await asyncio.to_thread(registration.close)
            assert await at.engines() == {}

    check(test)


def test_not_before_its_api_takes_connections(at: RouterAt) -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with running(engine), at.up():
            url = engine.url
            await engine.stop_api()
            async with registered(at, engine):
                await asyncio.sleep(0.5)
                assert await at.engines() == {}
                await engine._serve(web.Application(), url)
                await at.has("rack 1/e")

    check(test)


def test_it_leaves_when_its_api_stops_listening(at: RouterAt) -> None:
    """The first that a server does when it is told to end, and an engine may be killed before it is closed."""

    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with running(engine), at.up():
            url = engine.url
            async with registered(at, engine, seconds=60.0):
                await at.has("rack 1/e")
                await engine.stop_api()

                async def left() -> None:
                    while await at.engines():
                        await asyncio.sleep(0.02)

                await asyncio.wait_for(left(), 10)
                await engine._serve(web.Application(), url)
                await at.has("rack 1/e")

    check(test)


def test_it_leaves_when_it_is_about_to_end(at: RouterAt) -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with running(engine), at.up(), registered(at, engine, seconds=60.0) as made:
            await at.has("rack 1/e")
            made.end_soon()

            async def left() -> None:
                while await at.engines():
                    await asyncio.sleep(0.02)

            await asyncio.wait_for(left(), 10)

    check(test)


def test_a_restarted_engine_has_a_new_epoch_at_once(at: RouterAt) -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with running(engine), at.up():
            async with registered(at, engine) as old:
                await at.has("rack 1/e")
                before = engine.contract.epoch
                engine.restart()
                async with registered(at, engine):

                    async def renewed() -> None:
                        while (await at.has("rack 1/e"))["epoch"] == before:
                            await asyncio.sleep(0.02)

                    await asyncio.wait_for(renewed(), 10)
                    # The old one's farewell comes late, and is not taken for the new one's.
                    await asyncio.to_thread(old.close)
                    assert (await at.engines())["rack 1/e"]["epoch"] == engine.contract.epoch
            assert await at.engines() == {}

    check(test)


LEAVES = """
import sys
from deeplink.kvconnector.registration import Presence, leave_at_exit

router, epoch = sys.argv[1:]
leave_at_exit(router, Presence("rack 1/e", "", "", epoch), %r)
"""


def test_the_process_that_started_it_leaves_for_it(at: RouterAt) -> None:
    """As where the engine's own are killed. Not for an incarnation that came after."""

    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with running(engine), at.up(), registered(at, engine, seconds=60.0) as made:
            await at.has("rack 1/e")
            for epoch, left in (("an earlier one", False), (engine.contract.epoch, True)):
                command = [sys.executable, "-c", LEAVES % SECRET, at.url, epoch]
                process = await asyncio.create_subprocess_exec(*command)
                assert await asyncio.wait_for(process.wait(), 15) == 0
                assert (await at.engines() == {}) is left
            made.end_soon()

    check(test)


def test_a_router_that_restarts(at: RouterAt, caplog: pytest.LogCaptureFixture) -> None:
    """Away for longer than several tries: told about once, and found again without anybody's doing."""
    caplog.set_level(logging.INFO, registration.__name__)

    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with running(engine), registered(at, engine, seconds=0.9):
            await until(lambda: caplog.records)  # it is not there yet
            async with at.up():
                await at.has("rack 1/e")
            await asyncio.sleep(1.2)
            async with at.up():
                await at.has("rack 1/e")

    check(test)
    told = [record.levelname for record in caplog.records[:4]]
    assert told == ["WARNING", "INFO", "WARNING", "INFO"]
    assert "is not reached" in caplog.text


def test_another_secret(at: RouterAt, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        other = b"some other secret, 32 bytes long"
        async with running(engine), at.up(), registered(at, engine, other, seconds=0.9):
            await until(lambda: caplog.records)
            await asyncio.sleep(1.0)  # several tries
            assert await at.engines() == {}

    check(test)
    (told,) = caplog.records
    assert "does not accept this engine's token" in told.getMessage()
    assert "the same secret" in told.getMessage()


def test_a_name_that_is_taken(at: RouterAt, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with running(engine), at.up():
            body = {"url": engine.url, "control": engine.control}
            headers = {"Authorization": f"Bearer {KEY}"}
            url = f"{at.url}/deeplink/v1/engines/rack%201%2Fe"
            async with aiohttp.ClientSession() as client, client.put(url, json=body, headers=headers) as answer:
                assert answer.status == 200
            async with registered(at, engine):
                await until(lambda: caplog.records)
            assert "rack 1/e" in await at.engines()  # it was not its own to take away

    check(test)
    assert "register under another name" in caplog.text


@pytest.mark.parametrize(
    "answers",
    [
        b"",
        b"HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 404 No\r\nContent-Length: 9000\r\n\r\n" + b"[" * 9000,
        b"\x00\xff\n" * 50,
    ],
    ids=["nothing", "a list", "a deep one", "no HTTP"],
)
def test_what_is_no_router(answers: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answers)
            writer.close()

        engine = FakeEngine("e", make_contract("both"))
        async with running(engine), await asyncio.start_server(serve, "127.0.0.1", 0) as odd:
            url = f"http://127.0.0.1:{odd.sockets[0].getsockname()[1]}"
            made = Registration(url, presence(engine), SECRET)
            made.start()
            await until(lambda: caplog.records)
            await asyncio.to_thread(made.close)

    check(test)
    assert "does not have this engine, which goes on" in caplog.text


def test_closing_does_not_wait_for_a_router_that_hangs() -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            async with running(engine):
                made = Registration(f"http://127.0.0.1:{deaf.getsockname()[1]}", presence(engine), SECRET)
                made.start()
                await asyncio.sleep(0.3)
                await asyncio.wait_for(asyncio.to_thread(made.close), 10)

    check(test)


@pytest.mark.parametrize(
    "url",
    ["", "router:8000", "ftp://router:8000", "http://", "http://router:0", "http://router:99999", "http://router/v1",
     "http://router:8000?x", "http://[::1", "http://me@router", "http://router:8000#x"],
)  # fmt: skip
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registration.check_url(url)
    assert (caught.value.field, caught.value.ours) == ("deeplink-router", url)


@pytest.mark.parametrize("url", ["http://router:8000", "https://router/", "http://[::1]:8000/", "http://10.0.0.1"])
def test_what_is_one(url: str) -> None:
    assert registration.check_url(url) == url.rstrip("/")


def test_the_name_is_the_address() -> None:
    assert registration.name_of("http://10.0.0.1:8000") == "10.0.0.1:8000"
