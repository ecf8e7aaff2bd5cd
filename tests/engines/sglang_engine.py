"""SGLang on CPU as a process that the fleet starts, watches and ends."""

from __future__ import annotations

from functools import cache
from typing import Any

from fleet import SERVED, Fleet, Running

from deeplink.local import engines, environment, sglang
from deeplink.local.engines import Engine
from deeplink.local.environment import Environment

LIMITS = ("--max-total-tokens", "4096")
"""Little enough for requests to wait for each other."""


@cache
def installed() -> Environment:
    return environment.ensure(environment.SGLANG_CPU, print)


def prepare(fleet: Fleet, name: str, role: str, *, page: int, **settings: Any) -> Running:
    """An engine, not started; without a `role` it serves alone, as SGLang does without disaggregation."""
    api, port = engines.free_ports(2)
    values: dict[str, Any] = {"model": fleet.model, "config": fleet.config, "served_name": SERVED, **settings}
    flags = (*LIMITS, "--disaggregation-bootstrap-port", str(port), *values.pop("flags", ()))
    engine = Engine(name=name, role=role, port=api, block_size=page, max_num_seqs=8, flags=flags, **values)
    return Running(engine, sglang.process(engine, installed(), fleet.overlay, fleet.folder), installed())


def bootstrap(running: Running) -> int:
    """The port at which SGLang's decode engines look for a prefill engine."""
    words = running.process.argv
    return int(words[words.index("--disaggregation-bootstrap-port") + 1])
