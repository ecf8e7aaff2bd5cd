"""The process that owns the state: what it tells its workers, and that it has as many as it was told to have."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from deeplink import config as configs
from deeplink.errors import ConfigError
from deeplink.plugins import load_plugins
from deeplink.router import owner, speech
from deeplink.router.admission import Admission
from deeplink.router.choice import table
from deeplink.router.control import Control
from deeplink.router.desk import Desks
from deeplink.router.fleet import Fleet
from deeplink.router.metrics import Metrics
from deeplink.router.recent import Recent
from deeplink.router.worker import Start, read, written

from .fake_engine import SECRET, FakeEngine, make_contract, running
from .rig import check, until


class Wire(asyncio.Transport):
    """What is written to it is heard at once."""

    def __init__(self, line: speech.Line) -> None:
        super().__init__()
        self.line = line

    def write(self, data: Any) -> None:
        self.line.data_received(data)

    def is_closing(self) -> bool:
        return False


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_worker_that_is_killed_before_it_is_told_anything_is_started_again(
    loop: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = 0
    real = asyncio.create_subprocess_exec

    async def late(*words: Any, **more: Any) -> Any:
        nonlocal started
        process = await real(*words, **more)
        process.kill()
        await process.wait()
        await asyncio.sleep(0.1)
        started += 1
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", late)

    async def test() -> None:
        stop = asyncio.Event()
        keeping = asyncio.create_task(owner._keep(0, Start(b"", b"", None, str(tmp_path), 0), stop))
        await until(lambda: started > 2, 15.0)
        assert not keeping.done()
        stop.set()
        await asyncio.wait_for(keeping, 5)

    if loop == "asyncio":
        check(test)
    else:
        pytest.importorskip("uvloop").run(asyncio.wait_for(test(), 20))


def test_a_host_of_several_addresses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(family, socket.SOCK_STREAM, 6, "", (host, 0)) for family, host in ((2, "127.0.0.1"), (2, "127.0.0.2"))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(ConfigError) as caught:
        owner.bound("both", 0)
    assert (caught.value.field, caught.value.theirs) == ("router.host", "127.0.0.1, 127.0.0.2")


def test_a_worker_has_the_configuration_of_its_owner(tmp_path: Path) -> None:
    """One that has no limit too, which JSON could not say."""
    given = {
        "secret_file": str(tmp_path / "secret"),
        "router": {
            "kv_limit": float("inf"),
            "keys_file": str(tmp_path / "keys"),
            "tls": {"certificate": "c.pem", "key": "k.pem"},
            "paths": ["/v1/*"],
            "deadline": 0.25,
        },
        "engines": [
            {"name": "a", "url": "http://a:1", "weight": 0.5, "kind": "sglang", "settings": {"chip": "x"}, "rank": 1},
            {"name": "b", "url": "http://b:1"},
        ],
        "routes": [{"prefill": ["a"], "decode": ["b"], "up_to": 5}],
    }
    config = configs.parse(given, "test")
    assert read(written(config)) == config


def test_workers_are_told_what_has_changed_and_not_how_full_engines_are() -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        control = Control(SECRET)
        states: list[speech.State] = []
        async with running(engine):
            entry = {"name": "e", "url": engine.url, "control": engine.control}
            config = configs.parse({"router": {"poll": 0.02}, "engines": [entry]}, "test")
            async with Fleet(config, control) as fleet:
                admission = Admission(fleet, config.router, load_plugins().policies)
                desks = Desks(fleet, admission, Metrics(fleet, admission), Recent())
                fleet.on_change = desks.changed
                desks.new().connection_made(Wire(speech.Line(False, states.append, lambda: None)))
                watching = asyncio.create_task(desks.watch())
                await until(lambda: states and desks._said is not None)
                await asyncio.sleep(0.05)  # what was sent is out a moment later
                before = len(states)
                for held in range(1, 6):
                    engine.held = held
                    await until(lambda: fleet.use("e") == engine.held / 100)
                await asyncio.sleep(0)
                assert len(states) == before
                engine.early = True
                await until(lambda: states[-1].early == ["e"])
                engine.restart()
                await until(lambda: states[-1].engines[0].contract == engine.contract)
                assert table(states[-1].engines).able
                watching.cancel()
        await control.close()

    check(test)
