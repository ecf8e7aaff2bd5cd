"""SGLang engines that another router than deeplink's pairs, by an address and a room: by hand, and SGLang's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import sglang_engine
from fleet import SERVED, Fleet, Running, completion, http, prompt, quiet

from deeplink.local import engines, environment
from deeplink.local.environment import Lock
from deeplink.local.process import Process

ROUTER = Lock(
    name="sglang-router-0.3.2",
    file=Path(__file__).with_name("sglang-router-0.3.2.lock"),
    pythons=((3, 11), (3, 12), (3, 13)),
    imports=("sglang_router",),
)

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Rooms:
    fleet: Fleet
    prefill: Running
    decode: Running
    alone: Running


@pytest.fixture(scope="module")
def rooms(fleet: Fleet) -> Iterator[Rooms]:
    config = fleet.folder / "foreign.toml"
    config.write_text("[kv]\nforeign_seconds = 20\n")
    prefill = sglang_engine.prepare(fleet, "sglang-rooms-prefill", "prefill", page=16, config=config)
    decode = sglang_engine.prepare(fleet, "sglang-rooms-decode", "decode", page=64, config=config)
    alone = sglang_engine.prepare(fleet, "sglang-rooms-alone", "", page=64)
    fleet.start(prefill, decode, alone)
    yield Rooms(fleet, prefill, decode, alone)
    for one in (prefill, decode, alone):
        one.process.stop()


@pytest.fixture(scope="module")
def router(rooms: Rooms) -> Iterator[str]:
    """SGLang's own router, as it is published; its URL."""
    (port, metrics) = engines.free_ports(2)
    process = Process(
        "sglang-router",
        [
            environment.ensure(ROUTER, print).python,
            *("-m", "sglang_router.launch_router", "--pd-disaggregation"),
            *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)),
            *("--prefill", rooms.prefill.url, str(sglang_engine.bootstrap(rooms.prefill))),
            *("--decode", rooms.decode.url, "--disable-retries"),
        ],
        env=dict(os.environ),
        log=rooms.fleet.folder / "sglang-router.log",
        url=f"http://127.0.0.1:{port}",
        cwd=rooms.fleet.folder,
    )
    with process:
        process.wait_ready(60, "/readiness")
        yield process.url


@pytest.mark.parametrize(("room", "tokens"), [(2**60 + 1, 5), (17, 300)])
def test_the_same_body_to_both(rooms: Rooms, room: int, tokens: int) -> None:
    body = _native(prompt(tokens, seed=room % 1000))
    fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": sglang_engine.bootstrap(rooms.prefill)}
    paired = {**body, **fields, "bootstrap_room": room}
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(http, engine.url + "/generate", paired) for engine in (rooms.prefill, rooms.decode)]
        answers = [one.result(60) for one in both]
    assert [answer.status for answer in answers] == [200, 200], [answer.data for answer in answers]
    assert answers[1].json["output_ids"] == rooms.alone.alone(body, "/generate")["output_ids"]
    quiet(rooms.prefill, rooms.decode)


def test_sglangs_router_and_the_openai_sdk(rooms: Rooms, router: str) -> None:
    fields: dict[str, Any] = {
        "model": SERVED,
        "messages": [{"role": "user", "content": "Name three rivers, and say where they end."}],
        "max_tokens": 24,
        "temperature": 0,
    }
    with openai.OpenAI(base_url=router + "/v1", api_key="none", timeout=60, max_retries=0) as client:
        stream = client.chat.completions.create(**fields, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        whole = client.chat.completions.create(**fields)
    alone = rooms.alone.alone(fields, "/v1/chat/completions")["choices"][0]["message"]["content"]
    assert text == whole.choices[0].message.content == alone != ""
    quiet(rooms.prefill, rooms.decode)


def test_sglangs_router_and_many_at_once(rooms: Rooms, router: str) -> None:
    # That router takes token ids at SGLang's own endpoint alone.
    texts = [f"Page {index}. " + "They sailed on past another island. " * 11 * index for index in range(8)]
    bodies = [completion(text, 16) for text in texts]
    native = [_native(prompt(5 + 97 * index, seed=400 + index)) for index in range(4)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda body: http(router + "/v1/completions", body, seconds=120), bodies))
        generated = list(pool.map(lambda body: http(router + "/generate", body, seconds=120), native))
    for body, answer in zip(bodies, answers, strict=True):
        assert answer.status == 200, answer.data
        assert answer.json["choices"][0]["text"] == rooms.alone.alone(body)["choices"][0]["text"]
    for body, answer in zip(native, generated, strict=True):
        assert answer.status == 200, answer.data
        assert answer.json["output_ids"] == rooms.alone.alone(body, "/generate")["output_ids"]
    quiet(rooms.prefill, rooms.decode)


def _native(ids: list[int]) -> dict[str, Any]:
    return {"input_ids": ids, "sampling_params": {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}}
