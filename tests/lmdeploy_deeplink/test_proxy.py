"""LMDeploy's own router in front of two of its servers of unlike block sizes, with our migration backend in both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fleet import Answer, http
from programs import variables

from deeplink.local import engines, step
from deeplink.local.environment import Environment
from deeplink.local.process import Process, wait_all_ready

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]
START_SECONDS = 400.0
RUN = "from lmdeploy.cli import run; run()"
LENGTHS = (5, 16, 17, 63, 64, 65, 150)


class Stack:
    def __init__(self, proxy: Process, prefill: Process, decode: Process) -> None:
        self.proxy, self.prefill, self.decode = proxy, prefill, decode

    def complete(self, side: Process, words: str, **more: Any) -> Answer:
        body = {"model": "tiny", "prompt": words, "max_tokens": 16, "temperature": 0, "ignore_eos": True, **more}
        return http(f"{side.url}/v1/completions", body, seconds=120)

    def text(self, side: Process, words: str) -> str:
        answer = self.complete(side, words)
        assert answer.status == 200, answer.data
        text: str = answer.json["choices"][0]["text"]
        return text


@pytest.fixture(scope="module")
def stack(lmdeploy: Environment, in_lmdeploy: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("proxy")
    in_lmdeploy("make_models.py", folder / "model", "0")
    config = folder / "deeplink.toml"
    config.write_text("[kv]\nforeign_seconds = 30\n")
    ports = engines.free_ports(3)
    proxy_url = f"http://127.0.0.1:{ports[0]}"

    def process(name: str, port: int, words: list[Any]) -> Process:
        listen = ["--server-name", "127.0.0.1", "--server-port", str(port)]
        return Process(
            name,
            [lmdeploy.python, *words, *listen],
            env=step.clean_environ() | variables() | {"OMP_NUM_THREADS": "1", "DEEPLINK_CONFIG": str(config)},
            log=folder / f"{name}.log",
            url=f"http://127.0.0.1:{port}",
            cwd=folder,
        )

    def server(role: str, port: int, block_size: int) -> Process:
        words = ["-m", "deeplink.cli", "serve", "lmdeploy", folder / "model", "--model-name", "tiny", "--role", role]
        words += ["--dtype", "bfloat16", "--session-len", "512", "--max-batch-size", "8", "--eager-mode"]
        words += ["--num-gpu-blocks", "80", "--cache-block-seq-len", str(block_size), "--disable-metrics"]
        words += ["--migration-backend", "deeplink", "--proxy-url", proxy_url]
        return process(role.lower(), port, words)

    strategy = ["--serving-strategy", "DistServe", "--routing-strategy", "min_expected_latency"]
    proxy = process("proxy", ports[0], ["-c", RUN, "serve", "proxy", *strategy, "--disable-cache-status"])
    prefill, decode = server("Prefill", ports[1], 16), server("Decode", ports[2], 64)
    with proxy:
        wait_all_ready([proxy], START_SECONDS, "/v1/models")
        with prefill, decode:
            wait_all_ready([prefill, decode], START_SECONDS)
            yield Stack(proxy, prefill, decode)


def words(length: int) -> str:
    return " ".join(f"w{3 + (7919 * (place + length) + length) % 990}" for place in range(length))


def test_completions_are_those_of_the_decode_engine_alone(stack: Stack) -> None:
    for length in LENGTHS:
        assert stack.text(stack.proxy, words(length)) == stack.text(stack.decode, words(length)), length


def test_several_at_once(stack: Stack) -> None:
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda length: stack.text(stack.proxy, words(length)), range(20, 32)))
    assert texts == [stack.text(stack.decode, words(length)) for length in range(20, 32)]


def test_an_engine_says_that_it_compares_contracts(stack: Stack) -> None:
    told = json.loads(http(f"{stack.decode.url}/distserve/engine_info").json)
    assert (told["migration_backend"], told["block_size"]) == ("deeplink", 64)


def test_chat(stack: Stack) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": words(30)}], "max_tokens": 8, "temperature": 0}
    answers = [http(f"{side.url}/v1/chat/completions", body, seconds=120) for side in (stack.proxy, stack.decode)]
    assert [answer.status for answer in answers] == [200, 200], answers[0].data
    through, alone = (answer.json["choices"][0]["message"]["content"] for answer in answers)
    assert through == alone


def test_one_bad_request_fails_alone(stack: Stack) -> None:
    bad = {
        "protocol": 1,
        "remote_engine_id": stack.prefill.url,
        "remote_session_id": 5,
        "remote_token_id": 7,
        "remote_block_ids": [1, 2, 3],
    }
    assert stack.complete(stack.decode, words(40), migration_request=bad).status == 500
    assert "answered with 3 numbers" in stack.decode.log.read_text()
    assert stack.text(stack.proxy, words(41)) == stack.text(stack.decode, words(41))
