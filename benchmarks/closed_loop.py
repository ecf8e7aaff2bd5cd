"""An engine that always has `together` requests to serve, step by step: when a request is asked for, seen and ended.

This is how the runs of `silicon.py` were made: whoever has an answer asks for the next at once. What decides about the
time to first token there is who waits for whose prefill, which no formula of the mean load gives: requests of equal
lengths that were begun together end together and are asked for together again, so they stay a crowd, while those of
unequal lengths come one by one. So it is replayed.

A step takes every running request one token further, and begins as many waiting prompts as fit (`policy` 0: vLLM,
TensorRT-LLM), or it does nothing but prefill while a prompt waits (`policy` 1: SGLang, whose running requests thereby
stay in step). All three plan a step while the one before it runs, so a request joins the step after the next. Engines
that were told to wait until it is worth it (`batch_wait_*` of TensorRT-LLM) hold prompts back for some steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
CLIENT = 1e-3
"""Seconds from an answer until the next request of the same client is there, one client after the other."""


class Load(NamedTuple):
    """`spread` is by which part of itself a length is shorter at most."""

    together: int
    requests: int
    prompt: int
    output: int
    spread: float


class Engine(NamedTuple):
    """`room` is the cache in tokens, `reserved` the part of an answer for which there has to be room at the start,
    `budget` the new tokens of a step. A prompt that does not fit is cut if `chunked`. Prompts of fewer than
    `wait_tokens` in all are held back for up to `wait_steps`. `shown` is the seconds that it takes to tell one token to
    its client, one after the other."""

    policy: int
    room: float
    reserved: float
    budget: float
    chunked: bool
    wait_tokens: float
    wait_steps: int
    shown: float


class Costs(NamedTuple):
    """Seconds of a step, of each sequence in it, of each token of their caches, of each new token, and of each pair of
    a new token with one that it looks at."""

    step: float
    sequence: float
    cached: float
    token: float
    pair: float


@numba.njit(cache=True)
def replay(load: Load, engine: Engine, costs: Costs) -> tuple[Array, Array, Array, Array]:
    """By request: when it was asked for, when its first and last token were seen, and how many tokens it got."""
    np.random.seed(1)
    count, together = load.requests, load.together
    prompts, outputs = np.empty(count), np.empty(count)
    for i in range(count):
        prompts[i] = np.floor(load.prompt * (1 - load.spread * np.random.random()))
        outputs[i] = max(2.0, np.floor(load.output * (1 - load.spread * np.random.random())))
    asked, first, end = np.zeros(count), np.zeros(count), np.zeros(count)
    arrived, done, out = np.full(count, np.inf), np.zeros(count), np.zeros(count)
    sent = min(together, count)
    for i in range(sent):
        arrived[i] = (i + 1) * CLIENT
    client = sent * CLIENT  # when the clients are free again
    running, taken = np.empty(together, np.int64), np.empty(together)
    now, known, told, held = 0.0, 0.0, 0.0, 0.0
    active, waiting, ended, waited = 0, 0, 0, 0
    while ended < count:
        if active == 0:
            now = max(now, arrived[waiting])
            known = now
        decoding, context, least = 0, 0.0, np.inf
        for j in range(active):
            i = running[j]
            if done[i] >= prompts[i]:
                decoding += 1
                context += prompts[i] + out[i]
                least = min(least, outputs[i] - out[i])
        left = engine.budget - (decoding if engine.policy == 0 else 0)
        new, pairs = 0.0, 0.0
        for j in range(active):
            i = running[j]
            taken[j] = 0.0
            if done[i] < prompts[i] and left > 0:
                taken[j] = min(prompts[i] - done[i], left)
                pairs += taken[j] * (done[i] + taken[j] / 2)
                new += taken[j]
                left -= taken[j]
        hold = False
        if engine.wait_steps > 0 and decoding > 0:
            there, q = 0.0, waiting
            while q < sent and arrived[q] <= known and active + q - waiting < together:
                there += prompts[q]
                q += 1
            hold = 0 < there < engine.wait_tokens and waited < engine.wait_steps
            waited = waited + 1 if hold else 0
        while not hold and waiting < sent and arrived[waiting] <= known and active < together and left > 0:
            i = waiting
            need = prompts[i] + engine.reserved * outputs[i]
            if active > 0 and held + need > engine.room:
                break
            if not engine.chunked and prompts[i] > left and new > 0:
                break
            running[active] = i
            taken[active] = min(prompts[i], left) if engine.chunked else prompts[i]
            pairs += taken[active] ** 2 / 2
            new += taken[active]
            left -= taken[active]
            held += need
            active += 1
            waiting += 1
        steps = 1.0
        decodes = engine.policy == 0 or new == 0
        once = costs.step + costs.token * new + costs.pair * pairs
        if decodes:
            once += costs.sequence * decoding + costs.cached * context
        lasts = once
        if new == 0:
            # As many steps of the same kind at once as go by until one ends or one more is begun.
            steps = least
            if hold:
                steps = 1.0
            elif waiting < sent and active < together:
                need = prompts[waiting] + engine.reserved * outputs[waiting]
                if held + need <= engine.room:
                    steps = min(steps, max(1.0, np.ceil((arrived[waiting] - now) / once) + 1))
            lasts = steps * once + costs.cached * decoding * steps * (steps - 1) / 2
        known = now + lasts - once
        now += lasts
        begun, kept = 0, 0
        for j in range(active):
            begun += taken[j] > 0
        shown = (decoding if decodes else 0) + begun
        told = max(told + steps * shown * engine.shown, now + shown * engine.shown)
        for j in range(active):
            i = running[j]
            done[i] += taken[j]
            if out[i] > 0:
                if decodes:
                    out[i] += steps
            elif done[i] >= prompts[i]:
                out[i], first[i] = 1, told
            if out[i] < outputs[i]:
                running[kept] = i
                kept += 1
                continue
            held -= prompts[i] + engine.reserved * outputs[i]
            end[i] = told
            ended += 1
            if sent < count:
                client = max(client, told) + CLIENT
                asked[sent], arrived[sent] = told, client
                sent += 1
        active = kept
    return asked, first, end, outputs
