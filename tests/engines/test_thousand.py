"""A thousand requests at engines of vLLM for each thing that is killed at random meanwhile: every request ends in an
answer or a typed error before its deadline, no token is wrong, and nothing is left anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from broken_net import Net
from fleet import Pair, Running, completion, http, prompt, quiet, token_ids

from deeplink.local import engines
from deeplink.local.process import Process

REQUESTS = int(os.environ.get("DEEPLINK_TEST_REQUESTS", "1000"))
AT_A_TIME, TOKENS, DEADLINE = 16, 4, 30.0
SECONDS = DEADLINE + 15.0
"""A request has ended by then: some time to compute beside the deadline."""
START_SECONDS = 300.0
"""For an engine to come back, where others compute beside it."""
RESTARTS = 3
"""Of an engine, which takes up to a minute each."""
CHECKED = 40
"""Answers that are compared with those of the decode engine alone."""

Fault = Callable[[random.Random], None]
"""Does it once, and returns when all is as before."""


class Clients:
    """`cuts`: whether a connection may break before an answer; its client then asks again."""

    def __init__(self, url: str, cuts: bool) -> None:
        self._url = url
        self._netloc = urlsplit(url).netloc
        self._cuts = cuts
        self.answers: dict[int, list[int]] = {}
        self.ends: Counter[str] = Counter()
        self._lock = threading.Lock()

    def request(self, number: int) -> None:
        while (end := self._asked(number)) == "cut":
            assert self._cuts, "a connection broke before an answer"
        if end != "answered":
            self._wait()

    def _wait(self) -> None:
        """Until the router says that it can serve: or all that are left would be refused while one engine starts."""
        until = time.monotonic() + START_SECONDS
        while True:
            time.sleep(1.0)
            with contextlib.suppress(HTTPException, OSError):
                if http(self._url + "/health").status == 200:
                    return
            assert time.monotonic() < until, "no engine came back"

    def _asked(self, number: int) -> str:
        began = time.monotonic()
        with contextlib.closing(HTTPConnection(self._netloc, timeout=SECONDS)) as connection:
            try:
                connection.request("POST", "/v1/completions", json.dumps(body(number)))
                answer = connection.getresponse()
                said = json.loads(answer.read())
            except TimeoutError as exc:
                raise AssertionError(f"request {number} hangs") from exc
            except (HTTPException, OSError):
                end = "cut"
            else:
                assert answer.status in (200, 502, 503, 504), said
                end = "answered" if answer.status == 200 else str(said["error"]["code"])
                if end == "answered":
                    self.answers[number] = token_ids(said)
        assert time.monotonic() - began < SECONDS
        with self._lock:
            self.ends[end] += 1
        return end


def body(number: int) -> dict[str, object]:
    return completion(prompt(random.Random(number).randint(5, 150), seed=90_000 + number), TOKENS)


def killed(pair: Pair, engine: Running) -> Fault:
    left = RESTARTS

    def fault(dice: random.Random) -> None:
        nonlocal left
        if left:
            left -= 1
            engine.kill()
            time.sleep(dice.uniform(0, 3))
            pair.fleet.restart(engine)

    return fault


def worker_killed(router: Process) -> Fault:
    def fault(dice: random.Random) -> None:
        command = {pid: Path(f"/proc/{pid}/cmdline") for pid in router.descendants()}
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found = [pid for pid, path in command.items() if b"deeplink.router.worker" in path.read_bytes()]
            if found:
                os.kill(dice.choice(found), signal.SIGKILL)

    return fault


@contextmanager
def redis(folder: Path) -> Iterator[tuple[str, Fault]]:
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("there is no redis-server here")
    words = [server, "--port", "0", "--unixsocket", str(folder / "redis"), "--save", "", "--dir", str(folder)]
    running = subprocess.Popen(words, stdout=subprocess.DEVNULL)

    def fault(dice: random.Random) -> None:
        nonlocal running
        running.kill()
        running.wait(10)
        time.sleep(dice.uniform(0, 2))
        running = subprocess.Popen(words, stdout=subprocess.DEVNULL)

    try:
        yield f"unix://{folder / 'redis'}", fault
    finally:
        running.kill()
        running.wait(10)


@contextmanager
def network(*targets: str) -> Iterator[tuple[list[str], Fault]]:
    """Addresses that lead to these, through a network that fails."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    nets = [Net(target) for target in targets]

    def fault(dice: random.Random) -> None:
        asyncio.run_coroutine_threadsafe(dice.choice(nets).fail(dice), loop).result(10)

    try:
        for net in nets:
            asyncio.run_coroutine_threadsafe(net.start(), loop).result(10)
        yield [net.url for net in nets], fault
        for net in nets:
            asyncio.run_coroutine_threadsafe(net.stop(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@contextmanager
def disturbed(fault: Fault, seed: str) -> Iterator[None]:
    """The fault again and again while the context lasts; one that has begun is seen to its end."""
    over, dice = threading.Event(), random.Random(seed)

    def work() -> None:
        while not over.wait(dice.uniform(0.5, 4)):
            fault(dice)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        try:
            yield
        finally:
            over.set()
            done.result(300)


def counted(url: str) -> list[str]:
    """What the router still counts."""
    lines = http(url + "/metrics").data.decode().splitlines()
    counts = [line for line in lines if re.match(r"deeplink_(engine_requests|engine_tokens|queue)\b", line)]
    assert counts
    return [line for line in counts if not line.endswith(" 0.0")]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", ["prefill", "decode", "worker", "redis", "network"])
def test_a_thousand_requests(pair: Pair, what: str, tmp_path: Path) -> None:
    (port,) = engines.free_ports(1)
    lines = ["[router]", f"port = {port}", f"deadline = {DEADLINE}"]
    ours = (pair.prefill, pair.decode)
    urls = [f"http://127.0.0.1:{one.engine.port}" for one in ours]
    controls = [f"http://127.0.0.1:{one.engine.port + 1000}" for one in ours]
    with ExitStack() as ends:
        if what == "worker":
            lines.append("workers = 2")
        elif what == "redis":
            address, fault = ends.enter_context(redis(tmp_path))
            lines.append(f'redis = "{address}"')
        elif what == "network":
            through, fault = ends.enter_context(network(*urls, *controls))
            urls, controls = through[:2], through[2:]
        for one, url, control in zip(ours, urls, controls, strict=True):
            lines += ["[[engines]]", f'name = "{one.engine.name}"', f'url = "{url}"', f'control = "{control}"']
        router = pair.fleet.router_of(port, lines)
        if what == "worker":
            fault = worker_killed(router)
        elif what in ("prefill", "decode"):
            fault = killed(pair, pair.prefill if what == "prefill" else pair.decode)
        clients = Clients(router.url, cuts=what == "worker")
        with disturbed(fault, what), ThreadPoolExecutor(AT_A_TIME) as pool:
            list(pool.map(clients.request, range(REQUESTS)))
        found = clients.ends
        assert sum(found.values()) - found["cut"] == REQUESTS
        assert found["answered"] > 0.6 * REQUESTS, found
        end = time.monotonic() + 5
        while left := counted(router.url):
            assert time.monotonic() < end, left
            time.sleep(0.1)
        # What could not be cancelled, as the network had failed, ends with its ticket.
        quiet(*ours, seconds=DEADLINE + 5 if what == "network" else 5.0)
        router.stop()
    some = random.Random(what).sample(sorted(clients.answers), min(CHECKED, len(clients.answers)))
    right = {number: token_ids(pair.decode.alone(dict(body(number)))) for number in some}
    assert right == {number: clients.answers[number] for number in some}
