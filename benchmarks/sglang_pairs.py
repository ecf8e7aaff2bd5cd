"""Two pairs of SGLang engines with pages of 64 tokens, one with deeplink and one with SGLang's own backend; one alone.

SGLang's own is Mooncake over TCP, which runs on CPU with `mooncake_on_cpu`. All get the same requests in turns, the
pairs both engines at once, as SGLang's router sends them. What a handoff adds is the time to the first token less that
of the engine alone.
"""

from __future__ import annotations

import importlib.util
import random
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd import parameters, post, say, stream
from rows import Row

from deeplink import secret
from deeplink.kvconnector.contracts import contract as contracts
from deeplink.kvconnector.contracts.negotiate import Agreement, negotiate
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.local import client, engines, sglang
from deeplink.local.engines import Engine
from deeplink.local.environment import Environment
from deeplink.local.process import Process, wait_all_ready

LENGTHS = (100, 500, 900)
MARK = "SGLang's Mooncake over TCP"
START_SECONDS = 300.0
REQUEST_SECONDS = 60


@dataclass(frozen=True)
class Pair:
    """`paired` makes of a request the bodies for the prefill and the decode engine."""

    prefill: Engine
    decode: Engine
    processes: tuple[Process, Process]
    paired: Callable[[dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]]


def begin(
    engine: Callable[..., Engine], env: Environment, packages: Path, folder: Path, ends: ExitStack
) -> tuple[dict[str, Pair], Engine]:
    """Both pairs and the engine alone, ready; `ends` ends them. `engine` takes a name, a role and settings."""
    (bootstrap,) = engines.free_ports(1)
    # Without deeplink on the path the option that names its backend is none, so all is said in flags.
    backend = ("--disaggregation-transfer-backend", "mooncake_tcp", "--disaggregation-bootstrap-port", str(bootstrap))
    roles = {
        "prefill": ("--disaggregation-mode", "prefill", *backend),
        "decode": (
            *("--disaggregation-mode", "decode", *backend),
            *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
        ),
    }
    found = mooncake(folder)
    alone = engine("alone", "", env={"PYTHONPATH": str(sglang.SHIMS)})
    made = {
        "deeplink": tuple(engine(f"deeplink-{role}", role) for role in roles),
        "mooncake": tuple(engine(f"mooncake-{role}", "", flags=flags, env=found) for role, flags in roles.items()),
    }
    pairs = {}
    for name, both in made.items():
        say(f"starting the pair with {name}")
        first, second = (ends.enter_context(sglang.process(one, env, packages, folder)) for one in both)
        wait_all_ready([first, second], START_SECONDS)
        paired = ticketed(*both) if name == "deeplink" else roomed(bootstrap)
        pairs[name] = Pair(both[0], both[1], (first, second), paired)
    wait_all_ready([ends.enter_context(sglang.process(alone, env, packages, folder))], START_SECONDS)
    return pairs, alone


def timed(pairs: dict[str, Pair], alone: Engine, requests: int) -> Iterator[Row]:
    times: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    with ThreadPoolExecutor(1) as pool:
        for number in range(-1, requests):
            for length in LENGTHS:
                took = {name: handed(pair, pool, length) for name, pair in pairs.items()}
                took["alone"] = until_first(alone, body(length))
                for name, value in took.items():
                    if number >= 0:  # the one before warms up
                        times[name, length].append(1000 * value)
    for length in LENGTHS:
        ours, theirs, base = (times[name, length] for name in ("deeplink", "mooncake", "alone"))
        first = [statistics.median(some) for some in (ours, theirs)]
        yield Row(
            f"sglang_ttft_{length}", first[0], "ms", MARK, first[1], note=f"{statistics.median(base):.0f} ms alone"
        )
        more = [statistics.median(a - b for a, b in zip(some, base, strict=True)) for some in (ours, theirs)]
        yield Row(f"sglang_handoff_{length}", more[0], "ms", MARK, more[1], note="more than alone")


def handed(pair: Pair, pool: ThreadPoolExecutor, length: int) -> float:
    first, second = pair.paired(body(length))
    prefilled = pool.submit(post, pair.prefill, first)
    took = until_first(pair.decode, second)
    prefilled.result(REQUEST_SECONDS)
    return took


def until_first(engine: Engine, content: dict[str, Any]) -> float:
    began = time.perf_counter()
    arrived = list(stream(engine, {**content, "stream": True}))
    return arrived[0] - began


def ticketed(prefill: Engine, decode: Engine) -> Callable[[dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]]:
    key = secret.load()
    token = secret.control_token(key)
    producer, consumer = (
        contracts.decode(client.get(f"{engine.control}/v1/contract", token, "application/msgpack"))
        for engine in (prefill, decode)
    )
    agreement = negotiate(producer, consumer)
    assert isinstance(agreement, Agreement), agreement

    def paired(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        ticket = tickets.issue(tickets.new_handoff(), producer, consumer, agreement, REQUEST_SECONDS * 1000)
        text = tickets.mint(ticket, key)
        return {**content, **parameters("produce", text)}, {**content, **parameters("consume", text)}

    return paired


def roomed(bootstrap: int) -> Callable[[dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]]:
    def paired(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        room = random.getrandbits(62) | 1
        both = {**content, "bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap, "bootstrap_room": room}
        return both, both

    return paired


def body(length: int) -> dict[str, Any]:
    """A prompt of `length` tokens that nobody has seen before, and two more tokens."""
    prompt = [random.randrange(100, 40000) for _ in range(length)]
    return {"model": "demo", "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}


def mooncake(folder: Path) -> dict[str, str]:
    """What SGLang's processes find it by: from this environment, with the system's library where `make fabric` has put
    it, and the plugin that lets it run on CPU."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("Mooncake is not in this environment: make fabric")
    package, path = Path(spec.submodule_search_locations[0]), folder / "mooncake"
    path.mkdir()
    for part in package.parent.glob("mooncake*"):
        if part.suffix != ".dist-info":
            (path / part.name).symlink_to(part)
    shutil.copy(Path(__file__).with_name("mooncake_on_cpu.py"), path)
    info = path / "mooncake_on_cpu-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mooncake-on-cpu\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nmooncake_on_cpu = mooncake_on_cpu:install\n")
    libraries = sorted({str(file.parent) for file in (Path(sys.prefix) / "fabric").rglob("lib*.so.*")})
    return {"PYTHONPATH": f"{sglang.SHIMS}:{path}", "LD_LIBRARY_PATH": ":".join(libraries)}
