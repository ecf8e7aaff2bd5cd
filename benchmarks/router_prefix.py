"""The router's prefix policy on a trace of conversations, beside an oracle that sees all caches and beside least load.

    python benchmarks/router_prefix.py TRACE [--json FILE] [--save]

TRACE is Mooncake's conversation trace (JSON lines, may be gzipped): arrival, lengths, and the hashes of the prompt's
blocks of 512 tokens. It is replayed on 8 engines that are simulated: each prefills one prompt after the other at a
fixed rate, what its LRU cache holds of the beginning is free, and a prompt is in the cache once its prefill starts. No
clock, no HTTP: what is measured is the choice. The policies are the router's own, fed as the router feeds them. The
oracle chooses as the policy does, but knows what is cached.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rows import RESULTS, Row, machine, table, write_table

from deeplink.router import policies, prefix
from deeplink.router.kv_events import Stored
from deeplink.router.kv_index import Index, chain
from deeplink.router.load import Hold, Load
from deeplink.router.policy import Policy, Snapshot, View

BLOCK = 512
CHUNKS = BLOCK // prefix.CHUNK_TOKENS
ENGINES = 8
RATE = 8000.0
"""Tokens a second and engine: with nothing cached about two thirds of the time is spent."""
PROMPT = 32 << 10
"""Bytes, of four a token."""
CACHE = 500_000
"""Tokens each engine's cache has room for."""


@dataclass(frozen=True, slots=True)
class Request:
    at: float
    tokens: int
    blocks: tuple[int, ...]

    @property
    def chain(self) -> tuple[int, ...]:
        """As `prefix.hashes` would name the prompt's chunks: equal beginnings, equal names."""
        whole = self.tokens // BLOCK
        names = (block * CHUNKS + part + 1 for block in self.blocks[:whole] for part in range(CHUNKS))
        return tuple(names)[: prefix.MAX_CHUNKS]


@dataclass(slots=True)
class Engine:
    name: str
    free_at: float = 0.0
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    running: deque[tuple[float, Hold]] = field(default_factory=deque)

    def held(self, request: Request) -> int:
        """Tokens from the prompt's beginning that are in the cache now; the last is always computed."""
        count = 0
        for block in request.blocks:
            if block not in self.cache:
                break
            count += 1
        return min(count * BLOCK, request.tokens - 1)

    def prefill(self, request: Request) -> tuple[float, int]:
        """Seconds in the queue, and tokens that were cached."""
        start = max(request.at, self.free_at)
        cached = self.held(request)
        self.free_at = start + (request.tokens - cached) / RATE
        for block in reversed(request.blocks):
            self.cache.pop(block, None)
            self.cache[block] = None
        while len(self.cache) > CACHE // BLOCK:
            self.cache.popitem(last=False)
        return start - request.at, cached


@dataclass(frozen=True, slots=True)
class Outcome:
    hit: float
    p99: float


def replay(trace: Sequence[Request], policy: Policy, *, oracle: bool = False) -> Outcome:
    engines = [Engine(f"e{index}") for index in range(ENGINES)]
    load, prefixes, dice = Load(), prefix.Prefixes(), random.Random(1)
    for engine in engines:
        prefixes.resize(engine.name, CACHE)
    waits, cached = [], 0
    for turn, request in enumerate(trace):
        chain = request.chain
        for engine in engines:
            while engine.running and engine.running[0][0] <= request.at:
                engine.running.popleft()[1].end()
        views = tuple(
            View(
                engine.name,
                load.of(engine.name).prefill,
                requests=load.of(engine.name).requests,
                cached=engine.held(request) if oracle else prefixes.held(engine.name, chain),
            )
            for engine in engines
        )
        snapshot = Snapshot(
            "prefill", views, request.tokens, turn, (dice.random(), dice.random()), start=prefix.start(chain)
        )
        engine = engines[policy.pick(snapshot)]
        prefixes.add(engine.name, chain)
        hold = load.take(engine.name, prefill=request.tokens)
        wait, held = engine.prefill(request)
        engine.running.append((engine.free_at, hold))
        waits.append(wait)
        cached += held
    waits.sort()
    return Outcome(cached / sum(request.tokens for request in trace), waits[int(0.99 * len(waits))])


def most_cached(of: Snapshot) -> int:
    """What holds most of the prompt, whatever waits there."""
    return max(range(len(of.engines)), key=lambda index: (of.engines[index].cached, -of.engines[index].tokens))


def read(path: Path) -> Iterator[Request]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as lines:
        for line in lines:
            one = json.loads(line)
            if one["input_length"] >= BLOCK:
                yield Request(one["timestamp"] / 1000, one["input_length"], tuple(one["hash_ids"]))


def index_milliseconds(*, known: bool) -> float:
    """CPU time of one choice by what engines say they hold, its tokens at hand: 64 engines, a prompt of 32 kB, of which
    each holds another part. `known`: the prompt was looked up before."""
    count, size = 64, 16
    tokens = [random.Random(2).randrange(1 << 17) for _ in range(PROMPT // 4)]
    index = Index()
    for number in range(count):
        index.follow(f"e{number}")
        index.begin(f"e{number}")
        part = tokens[: (number + 1) * len(tokens) // count // size * size]
        blocks = tuple(range(len(part) // size))
        index.apply(f"e{number}", [Stored(blocks, None, tuple(part), size, keyed=False)])
    names, kept, spent = chain(tokens, size), array("I", tokens), []
    for turn in range(300):
        began = time.process_time()
        held = index.held({size: names if known else chain(kept, size)})
        views = tuple(
            View(f"e{number}", cached=held.get(f"e{number}", 0), exact=not index.why(f"e{number}"))
            for number in range(count)
        )
        assert policies.prefix(Snapshot("prefill", views, len(tokens), turn)) == count - 1
        spent.append(time.process_time() - began)
    return 1000 * sorted(spent)[len(spent) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true", help="into results/ and the table in README.md")
    options = parser.parse_args()
    trace = list(read(options.trace))
    ours = replay(trace, Policy(policies.prefix))
    oracle = replay(trace, Policy(policies.prefix), oracle=True)
    greedy = replay(trace, Policy(most_cached), oracle=True)
    least = replay(trace, Policy(policies.least_load))
    hashed = replay(trace, Policy(policies.consistent_hash))
    far = "an oracle that looks at nothing else"
    name, mark = "an oracle that sees all caches", "least load"
    rows = [
        Row("prefix_hit_vs_oracle", 100 * ours.hit, "%", name, 100 * oracle.hit, 0.95, "at least"),
        Row("prefix_queue_p99", ours.p99, "s", mark, least.p99, 1.0),
        Row("prefix_hit_vs_least_load", 100 * ours.hit, "%", mark, 100 * least.hit),
        Row("prefix_hit_vs_greedy", 100 * ours.hit, "%", far, 100 * greedy.hit),
        Row("prefix_queue_vs_greedy", ours.p99, "s", far, greedy.p99),
        Row("hash_hit_vs_oracle", 100 * hashed.hit, "%", name, 100 * oracle.hit),
        Row("hash_queue_p99", hashed.p99, "s", mark, least.p99),
        Row("exact_index_cpu_ms", index_milliseconds(known=False), "ms", "half a millisecond", 0.5, 1.0),
        Row("exact_index_cpu_ms_known_prompt", index_milliseconds(known=True), "ms", "half a millisecond", 0.5),
    ]
    result = {"machine": machine(), "requests": len(trace), "rows": [row.as_json() for row in rows]}
    print(table(result["rows"]))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.save:
        (RESULTS / "router_prefix.json").write_text(json.dumps(result, indent=1) + "\n")
        write_table("router-prefix", result)


if __name__ == "__main__":
    main()
