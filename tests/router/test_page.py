"""The web page: what it is fed with, who may see that, and the page itself in a browser where there is one."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deeplink.router import page
from deeplink.router.overview import overview
from deeplink.router.parts import ADMISSION, FLEET, RECENT
from deeplink.router.recent import Recent

from .fake_engine import CHUNKS, FakeEngine, answers, make_contract, stream
from .rig import Rig, check, pair, rig, until

KEY = "admin-key-0123456789"
BEARER = {"Authorization": f"Bearer {KEY}"}
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SHOT = os.environ.get("DEEPLINK_TEST_SCREENSHOT")


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "admin").write_text(KEY)
    (tmp_path / "inference").write_text("inference-key-0123456789")
    return {"admin_keys_file": str(tmp_path / "admin"), "keys_file": str(tmp_path / "inference")}


def shown(route: Rig) -> dict[str, Any]:
    return overview(route.app[FLEET], route.app[ADMISSION], route.app[RECENT])


def test_what_is_shown_follows_what_happens() -> None:
    async def test() -> None:
        producer, consumer = pair()
        gate = asyncio.Event()

        async def waits(request: Any) -> Any:
            await gate.wait()
            return await stream(request, CHUNKS)

        consumer.answer = waits
        async with rig(producer, consumer, retries=0) as route:
            task = asyncio.create_task(route.complete({"prompt": "x", "stream": True}))
            await until(lambda: consumer.calls)
            data = shown(route)
            assert [(one["name"], one["role"], one["chip"], one["state"]) for one in data["engines"]] == [
                ("p", "prefill", "cpu", "up"),
                ("d", "decode", "cpu", "up"),
            ]
            assert data["flows"] == [{"prefill": "p", "decode": "d", "live": 1, "done": 0}]
            assert data["phases"] == {"decoding": 1}
            assert data["ends"] == {}
            gate.set()
            assert (await task).status == 200
            await until(lambda: shown(route)["ends"] == {"done": 1})
            data = shown(route)
            assert data["flows"] == [{"prefill": "p", "decode": "d", "live": 0, "done": 1}]
            assert (data["requests"], data["failed"], data["phases"]) == (1, 0, {})
            assert 0 < data["first_byte"]["p50"] <= data["whole"]["p99"]
            consumer.answer = answers(500)
            await route.complete({"prompt": "x"})
            producer.answer = answers(400)
            await route.complete({"prompt": "x"})
            consumer.answer, producer.answer = waits, None
            gate.clear()
            task = asyncio.create_task(route.complete({"prompt": "x"}))
            await until(lambda: len(consumer.calls) == 3)
            task.cancel()
            ends = {"done": 1, "decode_failed": 1, "engine answered 400": 1, "client left": 1}
            await until(lambda: shown(route)["ends"] == ends)
            assert not route.app[RECENT].live

    check(test)


def test_the_page_is_anyones_and_what_it_shows_the_operators(keys: dict[str, str]) -> None:
    async def test() -> None:
        async with rig(*pair(), **keys) as route:
            for path in page.PATHS - {"/deeplink"}:
                got = await route.get(path)
                assert got.status == 200
                assert "default-src 'none'" in got.headers["Content-Security-Policy"]
                # Nothing is fetched from elsewhere.
                assert not re.findall(rb"(?:src|href|url|import|fetch)\W{1,3}https?:", got.data)
            assert (await route.get("/deeplink", allow_redirects=False)).status == 308
            for path in ("/deeplink/v1/overview", "/deeplink/v1/overview/stream"):
                assert (await route.get(path)).status == 401
                wrong = {"Authorization": "Bearer inference-key-0123456789"}
                assert (await route.get(path, headers=wrong)).status == 401
            got = await route.get("/deeplink/v1/overview", headers=BEARER)
            assert json.loads(got.data)["queue"] == 0

    check(test)


def test_without_operators_keys_it_is_open_like_the_metrics() -> None:
    async def test() -> None:
        async with rig(*pair()) as route:
            assert (await route.get("/deeplink/v1/overview")).status == 200

    check(test)


def test_pages_are_fed_every_second_and_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MOST", 1)
    monkeypatch.setattr(page, "SECONDS", 0.05)

    async def test() -> None:
        async with rig(*pair()) as route:
            async with route.client.get(route.url + "/deeplink/v1/overview/stream") as response:
                assert response.content_type == "text/event-stream"
                for _ in range(3):
                    line = await response.content.readuntil(b"\n\n")
                    assert json.loads(line.removeprefix(b"data: "))["engines"]
                assert (await route.get("/deeplink/v1/overview/stream")).status == 429
            await until(lambda: not route.app[page._LOOKING].pages)

    check(test)


def test_nothing_is_kept_of_requests_that_are_long_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deeplink.router.recent.WINDOW", 0.0)
    assert Recent().lately() == []


@asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    playwright = pytest.importorskip("playwright.async_api")
    if BROWSER is None:
        pytest.skip("there is no Chromium here")
    async with playwright.async_playwright() as made:
        chromium = await made.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        try:
            yield chromium
        finally:
            await chromium.close()


def test_the_page_in_a_browser(keys: dict[str, str]) -> None:
    gate = asyncio.Event()
    evil = "d1" if SHOT else "d<img src=x onerror=alert(1)>"

    async def waits(request: Any) -> Any:
        await gate.wait()
        return await stream(request, CHUNKS)

    async def test() -> None:
        chips = {"p0": "h200", "p1": "h200", "d0": "ascend-910b", evil: "mi300x"}
        engines = [FakeEngine(name, make_contract("prefill" if name[0] == "p" else "decode")) for name in chips]
        for engine, chip in zip(engines, chips.values(), strict=True):
            engine.contract = msgspec.structs.replace(engine.contract, chip=chip)
            engine.held = 42
        del keys["keys_file"]
        async with browser() as chromium, rig(*engines, **keys, retries=0) as route:
            for _ in range(20):
                assert (await route.complete({"prompt": "x"})).status == 200
            engines[0].answer = engines[1].answer = answers(500)
            await route.complete({"prompt": "x"})
            engines[0].answer = engines[1].answer = None
            for engine in engines[2:]:
                engine.answer = waits
            tasks = [asyncio.create_task(route.complete({"prompt": "x", "stream": True})) for _ in range(7)]
            await until(lambda: sum(len(engine.calls) for engine in engines[2:]) >= 27)
            tab = await chromium.new_page(viewport={"width": 1180, "height": 860})
            problems: list[str] = []
            tab.on("pageerror", lambda error: problems.append(str(error)))
            tab.on("dialog", lambda dialog: problems.append("a name was run as a script"))
            asked: list[str] = []
            tab.on("request", lambda request: asked.append(request.url))
            await tab.goto(route.url + "/deeplink/")
            await tab.fill("#key", "a wrong key, but a long one")
            await tab.click("button")
            await tab.wait_for_selector("#refused:not([hidden])")
            await tab.fill("#key", KEY)
            await tab.click("button")
            await tab.wait_for_selector("#all:not([hidden])")
            assert await tab.inner_text("#running") == "7"
            assert await tab.locator("#fleet tr").count() == 4
            assert await tab.locator("#flows path.live").count() >= 1
            assert evil in await tab.inner_text("#fleet")
            assert await tab.inner_text("#ends") == "done\t20\nprefill_failed\t1"
            if SHOT:
                await tab.screenshot(path=SHOT)
            gate.set()
            await asyncio.gather(*tasks)
            await tab.locator("#running", has_text=re.compile("^0$")).wait_for()
            assert not problems
            assert all(url.startswith(route.url) for url in asked), asked

    asyncio.run(asyncio.wait_for(test(), 50))
