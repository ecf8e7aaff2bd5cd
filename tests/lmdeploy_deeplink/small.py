"""LMDeploy's server with the tiny model, and whether what it answers is right."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fleet import http
from programs import variables

from deeplink.local import engines, step
from deeplink.local.environment import Environment
from deeplink.local.process import Process

START_SECONDS = 240.0
REFUSED_SECONDS = 90.0
LENGTHS = (5, 17, 64, 150)
TOKENS = 16
DTYPE = "bfloat16"


def environ() -> dict[str, str]:
    return step.clean_environ() | variables() | {"RAY_USAGE_STATS_ENABLED": "0"}


def python_with(folder: Path, *environments: Environment) -> Path:
    """The Python of a new environment in `folder` with the packages of these; those of the first come first."""
    made = [environments[0].python, "-I", "-m", "venv", "--without-pip", folder]
    subprocess.run(made, check=True, timeout=60)
    packages = [next(one.folder.glob("lib/python*/site-packages")) for one in environments]
    (next(folder.glob("lib/python*/site-packages")) / "others.pth").write_text("".join(f"{one}\n" for one in packages))
    return folder / "bin" / "python"


def server(python: Path, model: Path, folder: Path, *words: str) -> Process:
    (port,) = engines.free_ports(1)
    command = ["-m", "deeplink.cli", "serve", "lmdeploy", model, "--model-name", "demo", "--dtype", DTYPE]
    command += ["--server-name", "127.0.0.1", "--server-port", str(port), "--session-len", "1024", "--eager-mode"]
    command += ["--max-batch-size", "4", "--cache-block-seq-len", "16", "--cache-max-entry-count", "0.05"]
    command += ["--disable-metrics", "--logprobs-mode", "raw_logprobs"]
    return Process(
        "lmdeploy",
        [python, *command, *words],
        env=environ(),
        log=folder / "lmdeploy.log",
        url=f"http://127.0.0.1:{port}",
        cwd=folder,
    )


def answers_are_right(
    process: Process, model: Path, in_lmdeploy: Any, at_once: int = len(LENGTHS), rounds: int = 1
) -> None:
    """With so many requests at once the engine is at most twice as far from float32 as transformers in its type."""
    asked = LENGTHS * rounds
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda length: _generate(process, length), asked))
    found = json.loads(in_lmdeploy("beside_transformers.py", model, DTYPE, given=json.dumps(answers), seconds=200))
    near(found, asked)


def near(found: list[dict[str, float]], lengths: Sequence[int]) -> None:
    """Of what `beside_transformers.py` has found of answers to prompts of these lengths."""
    largest = {name: max(one[name] for one in found) for name in ("engine", "own", "regret")}
    print(json.dumps(largest))
    assert largest["own"] > 0
    for length, one in zip(lengths, found, strict=True):
        assert one["engine"] <= 2 * largest["own"], (length, one)
        assert one["regret"] <= 2 * largest["own"], (length, one)


def some_leave(process: Process, requests: int, at_once: int) -> None:
    """Requests that are given up when the first of their tokens are there."""

    def leave(_: int) -> None:
        where = urlsplit(process.url)
        connection = HTTPConnection(where.hostname or "", where.port, timeout=60)
        body = {"input_ids": list(range(10, 80)), "max_tokens": 400, "ignore_eos": True, "stream": True}
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.read(16)
        answer.close()
        connection.close()

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(leave, range(requests)))


def _generate(process: Process, length: int) -> dict[str, Any]:
    ids = [3 + (7919 * (place + length)) % 990 for place in range(length)]
    body = {"input_ids": ids, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_logprob": True}
    answer = http(f"{process.url}/generate", body, seconds=120)
    assert answer.status == 200, answer.data
    chosen = answer.json["meta_info"]["output_token_logprobs"]
    return {"prompt": ids, "tokens": answer.json["output_ids"], "logprobs": [logprob for logprob, _ in chosen]}
