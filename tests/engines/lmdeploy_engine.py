"""LMDeploy on CPU as a process that the fleet starts, watches and ends."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from fleet import SERVED, Fleet, Running, http

from deeplink.local import engines, environment, lmdeploy, step
from deeplink.local.engines import Engine
from deeplink.local.environment import Environment
from deeplink.local.process import Process

END = 2
"""The token that a request for exactly so many tokens is never answered with, however likely it is."""
MAKE_MODELS = Path(__file__).parents[1] / "lmdeploy_deeplink" / "make_models.py"


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
        token in each place that an answer does not end with. The engine has no role."""
        asked = {"input_ids": ids, "max_tokens": 0, "return_logprob": True, "logprob_start_len": start - 1}
        answer = http(self.url + "/generate", {**asked, "top_logprobs_num": 2}, seconds=120)
        assert answer.status == 200, answer.data
        told = answer.json["meta_info"]
        own = [float(value) for value, _ in told["input_token_logprobs"]]
        best = [max(float(value) for value, token in top if token != END) for top in told["input_top_logprobs"]]
        assert len(own) == len(best) == len(ids) - start, told
        return own, best


@cache
def installed() -> Environment:
    return environment.ensure(environment.LMDEPLOY_CPU, _say)


def prepare(fleet: Fleet, name: str, role: str, *, block: int, **settings: Any) -> Lmdeploy:
    """An engine, not started; without a `role` it serves alone, as LMDeploy does without disaggregation."""
    (port,) = engines.free_ports(1)
    values: dict[str, Any] = {
        "model": fleet.model,
        "config": fleet.config,
        "served_name": SERVED,
        "dtype": "bfloat16",
        **settings,
    }
    engine = Engine(name=name, role=role, port=port, block_size=block, max_num_seqs=8, **values)
    return Lmdeploy(engine, _process(fleet, engine), installed())


def again(fleet: Fleet, running: Running) -> Process:
    """A new incarnation on the same ports, not started."""
    return _process(fleet, running.engine)


def small_model(fleet: Fleet) -> Path:
    """Of random weights, and such that what comes next depends on all of the prompt. Its words are w0 to w999."""
    target = fleet.folder / "small-model"
    env = step.clean_environ() | {"HF_HUB_OFFLINE": "1"}
    subprocess.run([installed().python, MAKE_MODELS, target, "0"], check=True, timeout=300, env=env)
    return target


def _process(fleet: Fleet, engine: Engine) -> Process:
    return lmdeploy.process(engine, installed(), fleet.overlay, fleet.folder)


def _say(text: str) -> None:
    print(text, file=sys.stderr)
