"""Lets the workers of an engine sleep a moment where vLLM has them spin. Loaded by vLLM as a general plugin.

Between steps the workers of a tensor-parallel engine, and its core, give their processor up and ask for it again
without pause. That is right where each has a core of its own. Where they are more than the cores, whatever else was to
run on the machine, deeplink's threads and the other engine among it, was seen to wait for up to a minute.
"""

from __future__ import annotations

import time

SECONDS = 0.0005


def install() -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(SECONDS)
