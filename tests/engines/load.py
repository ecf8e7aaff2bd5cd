"""Two hundred requests, sixteen at a time: some clients leave, an engine starts anew, and nobody gets a wrong token."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

from fleet import Fleet, Running, completion, prompt, quiet, token_ids

REQUESTS, AT_A_TIME, ABORTED, RESTART_AFTER = 200, 16, 0.2, 80
TOKENS = 8
SECONDS = 40.0
"""A request has ended by then: the router's deadline of 30, and some time to compute."""


class Run:
    def __init__(self, url: str, restart: Callable[[], None]) -> None:
        self._netloc = urlsplit(url).netloc
        self._begin_anew = restart
        self.answers: dict[int, list[int]] = {}
        self.ends: Counter[str] = Counter()
        self.up = threading.Event()
        self.up.set()
        self._lock = threading.Lock()

    def request(self, number: int) -> None:
        dice = random.Random(number)
        body = completion(prompt(dice.randint(5, 400), seed=50_000 + number), TOKENS)
        connection = HTTPConnection(self._netloc, timeout=SECONDS)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            if dice.random() < ABORTED:
                time.sleep(dice.uniform(0, 2))
                end = "left"
            else:
                end = self._hear(number, connection)
        with self._lock:
            self.ends[end] += 1
            restart = sum(self.ends.values()) == RESTART_AFTER
        if restart:
            self._restart()
        elif end == "refused":
            assert self.up.wait(400), "the engine is not back"

    def _hear(self, number: int, connection: HTTPConnection) -> str:
        try:
            answer = connection.getresponse()
            said = json.loads(answer.read())
        except (HTTPException, OSError) as exc:
            raise AssertionError(f"request {number} has no answer: {exc!r}") from exc
        if answer.status == 200:
            self.answers[number] = token_ids(said)
            return "answered"
        assert answer.status in (502, 503, 504), said
        assert said["error"]["code"], said
        return "refused"

    def _restart(self) -> None:
        self.up.clear()
        try:
            self._begin_anew()
        finally:
            self.up.set()


Wrong = dict[int, tuple[list[int], list[int]]]


def run(fleet: Fleet, prefill: Running, decode: Running, alone: Running, router: str) -> tuple[Counter[str], Wrong]:
    """How many were `answered`, `refused` with a reason, and `left`; and those that got other tokens than
    `alone` gives, by number with both. `alone` is the decode engine, or one like it where that serves nobody alone.

    What it asserts itself is that each request ends in one of these ways, and that nothing is held after.
    """
    found = Run(router, lambda: fleet.restart(decode))
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(found.request, range(REQUESTS)))
    time.sleep(1)
    quiet(prefill, decode, seconds=0.2)

    def expected(number: int) -> list[int]:
        body = completion(prompt(random.Random(number).randint(5, 400), seed=50_000 + number), TOKENS)
        return token_ids(alone.alone(body))

    with ThreadPoolExecutor(4) as pool:
        right = dict(zip(found.answers, pool.map(expected, found.answers), strict=True))
    wrong = {number: (answer, right[number]) for number, answer in found.answers.items() if answer != right[number]}
    return found.ends, wrong
