"""LMDeploy on CPU as a process that the fleet starts, watches and ends."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from fleet import SERVED, Fleet, Running, http

from deeplink.local import engines, environment, step
from deeplink.local.engines import Engine
from deeplink.local.environment import Environment
from deeplink.local.process import Process

MAKE_MODELS = Path(__file__).parents[1] / "lmdeploy_deeplink" / "make_models.py"
ROLES = {"prefill": "Prefill", "decode": "Decode"}


class Lmdeploy(Running):
    """Its completions take texts and give texts; token ids go through its chat."""

    def body(self, ids: list[int], tokens: int, **more: Any) -> dict[str, Any]:
        """A greedy request for exactly `tokens` tokens, with their ids."""
        return {
            "model": SERVED,
            "messages": [],
            "input_ids": ids,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }

    def scores(self, ids: list[int], start: int) -> tuple[list[float], list[float]]:
        """The log-probability of each token of `ids` from `start` on, after those before it; and that of the likeliest
        token in each place. The engine has no role."""
        asked = {"input_ids": ids, "max_tokens": 0, "return_logprob": True, "logprob_start_len": start - 1}
        answer = http(self.url + "/generate", {**asked, "top_logprobs_num": 1}, seconds=120)
        assert answer.status == 200, answer.data
        told = answer.json["meta_info"]
        own = [float(value) for value, _ in told["input_token_logprobs"]]
        best = [max(float(value) for value, _ in top) for top in told["input_top_logprobs"]]
        assert len(own) == len(best) == len(ids) - start, told
        return own, best


@cache
def installed() -> Environment:
    return environment.ensure(environment.LMDEPLOY_CPU, _say)


def prepare(fleet: Fleet, name: str, role: str, *, block: int, **settings: Any) -> Lmdeploy:
    """An engine, not started; without a `role` it serves alone, as LMDeploy does without disaggregation."""
    (port,) = engines.free_ports(1)
    values: dict[str, Any] = {
        "model": _model(fleet),
        "config": fleet.config,
        "served_name": SERVED,
        "dtype": "bfloat16",
        **settings,
    }
    engine = Engine(name=name, role=role, port=port, block_size=block, **values)
    return Lmdeploy(engine, _process(fleet, engine), installed())


def again(fleet: Fleet, running: Running) -> Process:
    """A new incarnation on the same ports, not started."""
    return _process(fleet, running.engine)


def _model(fleet: Fleet) -> Path:
    """The fleet's; its position encoding and kind of tokenizer are called what LMDeploy's transformers calls them."""
    target = fleet.folder / "model-for-lmdeploy"
    if target.exists():
        return target
    target.mkdir()
    for file in fleet.model.iterdir():
        (target / file.name).symlink_to(file)
    tokenizer, config = (
        json.loads((fleet.model / name).read_text()) for name in ("tokenizer_config.json", "config.json")
    )
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    for name, changed in (("tokenizer_config.json", tokenizer), ("config.json", config)):
        (target / name).unlink()
        (target / name).write_text(json.dumps(changed))
    return target


def small_model(fleet: Fleet) -> Path:
    """Of random weights, and such that what comes next depends on all of the prompt. Its words are w0 to w999."""
    target = fleet.folder / "small-model"
    env = step.clean_environ() | {"HF_HUB_OFFLINE": "1"}
    subprocess.run([installed().python, MAKE_MODELS, target, "0"], check=True, timeout=300, env=env)
    return target


def _process(fleet: Fleet, engine: Engine) -> Process:
    words: list[str | Path] = ["-m", "deeplink.cli", "serve", "lmdeploy", engine.model, "--model-name", SERVED]
    words += ["--dtype", engine.dtype, "--server-name", "127.0.0.1", "--server-port", str(engine.port)]
    words += ["--session-len", "1024", "--max-prefill-token-num", "1024", "--max-batch-size", "8", "--eager-mode"]
    words += ["--cache-block-seq-len", str(engine.block_size), "--num-gpu-blocks", str(8192 // engine.block_size)]
    words += ["--logprobs-mode", "raw_logprobs", "--disable-metrics"]
    if engine.role:
        words += ["--role", ROLES[engine.role], "--migration-backend", "deeplink"]
    return Process(
        engine.name,
        [installed().python, *words, *engine.flags],
        env=step.clean_environ()
        | {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(fleet.overlay),
            "PYTHONSAFEPATH": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "DEEPLINK_CONFIG": str(engine.config),
            **engine.env,
        },
        log=fleet.folder / f"{engine.name}.log",
        url=engine.url,
        cwd=fleet.folder,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr)
