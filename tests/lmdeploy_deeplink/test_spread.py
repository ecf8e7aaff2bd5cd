"""LMDeploy's server on a CPU whose layers are spread over two processes: Ray's, or LMDeploy's own.

Those of Ray know deeplink by a file in an environment, which is one that is thrown away.
"""

from __future__ import annotations

import json
import subprocess
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fleet import http
from programs import HERE, say, variables

from deeplink.errors import LocalError
from deeplink.local import engines, environment, step
from deeplink.local.environment import Environment, Lock
from deeplink.local.process import Process

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]
RAY = Lock(
    name="ray-2.60.0",
    file=Path(__file__).with_name("ray-2.60.0.lock"),
    pythons=environment.LMDEPLOY_CPU.pythons,
    imports=(),
)
START_SECONDS = 240.0
TOKENS = 16
LENGTHS = (5, 17, 64, 150)
DTYPE = "bfloat16"


@pytest.fixture(scope="module")
def python(lmdeploy: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment that is thrown away and has what LMDeploy's has, and Ray."""
    folder = tmp_path_factory.mktemp("with-ray")
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    others = [next(one.folder.glob("lib/python*/site-packages")) for one in (lmdeploy, environment.ensure(RAY, say))]
    (packages / "others.pth").write_text("".join(f"{other}\n" for other in others))
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def model(lmdeploy: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("model") / "small"
    subprocess.run([lmdeploy.python, HERE / "make_models.py", target, "0"], check=True, timeout=300, env=environ())
    return target


def environ() -> dict[str, str]:
    return step.clean_environ() | variables() | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_METRICS_COLLECTION": "1"}


def server(python: Path, model: Path, folder: Path, *words: str) -> Process:
    (port,) = engines.free_ports(1)
    command = ["-m", "deeplink.cli", "serve", "lmdeploy", model, "--model-name", "demo", "--dtype", DTYPE, "--tp", "2"]
    command += ["--server-name", "127.0.0.1", "--server-port", str(port), "--session-len", "1024", "--eager-mode"]
    command += ["--max-batch-size", "4", "--cache-block-seq-len", "16", "--num-gpu-blocks", "100", "--disable-metrics"]
    command += ["--logprobs-mode", "raw_logprobs"]
    return Process(
        "lmdeploy",
        [python, *command, *words],
        env=environ(),
        log=folder / "lmdeploy.log",
        url=f"http://127.0.0.1:{port}",
        cwd=folder,
    )


def generate(process: Process, length: int) -> dict[str, Any]:
    ids = [3 + (7919 * (place + length)) % 990 for place in range(length)]
    body = {"input_ids": ids, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_logprob": True}
    answer = http(f"{process.url}/generate", body, seconds=120)
    assert answer.status == 200, answer.data
    chosen = answer.json["meta_info"]["output_token_logprobs"]
    return {"prompt": ids, "tokens": answer.json["output_ids"], "logprobs": [logprob for logprob, _ in chosen]}


def command(python: Path, word: str) -> None:
    words = [python, "-m", "deeplink.cli", "serve", "workers", word]
    subprocess.run(words, check=True, timeout=60, env=environ())


@pytest.fixture
def enabled(python: Path) -> Iterator[None]:
    command(python, "enable")
    yield
    command(python, "disable")


@pytest.mark.usefixtures("enabled")
def test_two_workers_of_rays(python: Path, model: Path, in_lmdeploy: Any, tmp_path: Path) -> None:
    with server(python, model, tmp_path, "--distributed-executor-backend", "ray") as process:
        process.wait_ready(START_SECONDS)
        answers_are_right(process, model, in_lmdeploy)
        assert working(process) == 2


def test_two_processes_of_lmdeploys(lmdeploy: Environment, model: Path, in_lmdeploy: Any, tmp_path: Path) -> None:
    with server(lmdeploy.python, model, tmp_path, "--distributed-executor-backend", "mp") as process:
        process.wait_ready(START_SECONDS)
        answers_are_right(process, model, in_lmdeploy)


def test_workers_that_nothing_has_told_of_deeplink_are_refused(python: Path, model: Path, tmp_path: Path) -> None:
    with (
        server(python, model, tmp_path) as process,
        pytest.raises(LocalError, match="nothing brings deeplink into them"),
    ):
        process.wait_ready(START_SECONDS)


def test_they_hand_nothing_over(lmdeploy: Environment, model: Path, tmp_path: Path) -> None:
    words = ("--role", "Prefill", "--migration-backend", "deeplink")
    with (
        server(lmdeploy.python, model, tmp_path, "--distributed-executor-backend", "mp", *words) as process,
        pytest.raises(LocalError, match="this release migrates only with one of: tp"),
    ):
        process.wait_ready(START_SECONDS)


def answers_are_right(process: Process, model: Path, in_lmdeploy: Any) -> None:
    """As near to float32 as the rule for one process asks (`test_engine`)."""
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        answers = list(pool.map(lambda length: generate(process, length), LENGTHS))
    found = json.loads(in_lmdeploy("beside_transformers.py", model, DTYPE, given=json.dumps(answers), seconds=200))
    print(json.dumps(found))
    spread = max(one["own"] for one in found)
    assert spread > 0
    for length, one in zip(LENGTHS, found, strict=True):
        assert one["engine"] <= 2 * spread, (length, one)
        assert one["regret"] <= 2 * spread, (length, one)


def working(process: Process) -> int:
    return sum(b"RayWorkerWrapper" in Path(f"/proc/{one}/cmdline").read_bytes() for one in process.descendants())
