"""An edit of the file takes effect without a restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deeplink import config as configs
from deeplink.config import EngineEntry
from deeplink.router.control import Control
from deeplink.router.fleet import Fleet
from deeplink.router.listed import Listed

from .fake_engine import SECRET, FakeEngine, make_contract
from .rig import check, running, until


def write(path: Path, *engines: FakeEngine) -> None:
    text = "".join(f'[[engines]]\nname = "{e.name}"\nurl = "{e.url}"\ncontrol = "{e.control}"\n' for e in engines)
    draft = path.with_suffix(".new")
    draft.write_text(text)
    os.replace(draft, path)


@asynccontextmanager
async def following(path: Path, seconds: float) -> AsyncIterator[tuple[Fleet, Listed]]:
    config = configs.load(path)
    control = Control(SECRET)
    try:
        async with Fleet(config, control) as fleet:
            listed = Listed(path, config, fleet, seconds)
            task = asyncio.create_task(listed.follow())
            yield fleet, listed
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    finally:
        await control.close()


def seen(fleet: Fleet) -> dict[str, str]:
    return {engine.name: engine.down for engine in fleet.table.engines}


def engines() -> tuple[FakeEngine, ...]:
    return tuple(FakeEngine(name, make_contract("both")) for name in "abc")


def test_engines_come_go_and_move_with_the_file(tmp_path: Path) -> None:
    async def test() -> None:
        a, b, c = engines()
        path = tmp_path / "deeplink.toml"
        async with running(a, b, c):
            write(path, a, b)
            async with following(path, 0.05) as (fleet, _):
                before = fleet.table.engines[0]
                write(path, a, c)
                await until(lambda: seen(fleet) == {"a": "", "c": ""})
                assert fleet.table.engines[0] is before, "what is the same is left alone"
                b.name = "a"
                write(path, b, c)
                await until(lambda: fleet.table.engines[0].contract == b.contract)

    check(test)


def test_a_wrong_file_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        a, b, _ = engines()
        path = tmp_path / "deeplink.toml"
        async with running(a, b):
            write(path, a)
            async with following(path, 0.05) as (fleet, _):
                path.write_text("[[engines]]\nname = 1\n")
                await until(lambda: "stay as they are" in caplog.text)
                path.unlink()
                await asyncio.sleep(0.1)
                assert seen(fleet) == {"a": ""}
                write(path, a, b)
                await until(lambda: seen(fleet) == {"a": "", "b": ""})

    with caplog.at_level(logging.INFO):
        check(test)


def test_others_engines_stay_and_it_is_looked_at_when_told(tmp_path: Path) -> None:
    async def test() -> None:
        a, b, c = engines()
        path = tmp_path / "deeplink.toml"
        async with running(a, b, c):
            write(path, a)
            async with following(path, 60.0) as (fleet, listed):
                fleet.put(EngineEntry(name="c", url=c.url, control=c.control))
                write(path, b)
                await asyncio.sleep(0.1)
                assert set(seen(fleet)) == {"a", "c"}
                listed.look_now()
                await until(lambda: set(seen(fleet)) == {"b", "c"})

    check(test)
