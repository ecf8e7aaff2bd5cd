"""KV caches on a device and on the host, handed over both ways: exact or not, and how fast. No engine is needed.

    benchmarks/device_handoff.sh [--device cuda] [--json] [--save] [--tokens N] [--layers N] [--rounds N]

Two engines with nothing in them but their caches, in one process: one as vLLM's on CPUs packs it, in blocks of 128, one
in one of the layouts of devices. What arrives is compared bit by bit with what numpy reads of the same bytes, and the
digests of both sides with that of a gather by numpy. With `--device cpu` the device is the host's memory: all that this
program does is then tested, and its figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from rows import RESULTS, Row, machine, table, write_table

from deeplink.bench.engine import SECRET, Engine, Shape
from deeplink.bench.rows import Skipped
from deeplink.bench.timing import Best, take_turns
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.caches.device_cache import DeviceCache
from deeplink.kvconnector.contracts.negotiate import Agreement, negotiate
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.layouts.catalogue import LAYOUTS
from deeplink.kvconnector.relayout import compiled, device, digest
from deeplink.kvconnector.relayout.plan import Chunk, runs

HOST = ("vllm-cpu-vec", 128)
LAYOUT_OF = {
    "nhd": ("vllm-nhd", 16),
    "hnd": ("vllm-hnd", 16),
    "kv_in_block": ("vllm-kv-in-block", 64),
    "ascend": ("vllm-ascend-910", 128),
    "nz": ("vllm-ascend-310p", 128),
    "slots": ("sglang-nhd", 1),
}
"""What devices have, by the catalogue's name, and the tokens of a block."""
SECONDS = 120.0
UNIT = "GB/s"


@dataclass(frozen=True)
class Machine:
    """The device, and how to wait for it."""

    device: torch.device

    @property
    def crosses(self) -> bool:
        return self.device.type not in device.HOST

    def done(self) -> None:
        if self.crosses:
            device.runtime(self.device).synchronize(self.device)

    def empty(self, size: int) -> torch.Tensor:
        return torch.full((size,), 1, dtype=torch.uint8, device=self.device)

    def hold(self, cache: Cache) -> DeviceCache:
        """A copy of the cache in the device's memory."""
        tensors = (torch.from_numpy(layer.view(np.int16)).clone().to(self.device) for layer in cache.layers)
        return DeviceCache(tuple(tensors), cache.bound)

    def timed(self, action: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            action()
            self.done()

        return run


def conversions(on: Machine, shape: Callable[[str], Shape], rounds: int) -> Iterator[Row]:
    """Between blocks and wire, both on the device."""
    for name in LAYOUT_OF:
        of = shape(name)
        cache = on.hold(of.hold(0, seed=1).values)
        where = list(runs(of.table(1), of.block_size, Chunk(0, of.tokens)))
        wire = on.empty(of.bytes).view(torch.int16).view(cache.wire_shape(of.tokens))
        move = partial(device.relayout, cache.layers, cache.bound, where, wire)
        actions = {
            "copy": on.timed(copying(on.empty(of.bytes), on.empty(of.bytes))),
            "gather": on.timed(partial(move, "wire")),
            "scatter": on.timed(partial(move, "blocks")),
        }
        best = take_turns(actions, rounds)
        for act in ("gather", "scatter"):
            yield _row(f"device_relayout_{name}_{act}", best, act, "copy", "copy_ on the device", of.bytes)


def crossings(on: Machine, of: Shape, rounds: int) -> Iterator[Row | Skipped]:
    """A whole gather into host memory and a scatter out of it, the digest of what is there, and plain copies."""
    cache, plain = on.hold(of.hold(0, seed=1).values), on.empty(of.bytes)
    wire = np.ones(cache.wire_shape(of.tokens), cache.dtype)
    host = torch.from_numpy(wire.view(np.uint8).reshape(-1))
    chunk, blocks = Chunk(0, of.tokens), of.table(1)
    actions = {
        "copy": on.timed(copying(on.empty(of.bytes), plain)),
        "down": on.timed(copying(host, plain)),
        "up": on.timed(copying(plain, host)),
        "gather": lambda: cache.gather(blocks, chunk, wire),
        "scatter": lambda: cache.scatter(wire, 0, blocks, chunk),
        "digest": lambda: digest.tiles(chunk, wire),
    }
    if on.crosses:
        pinned = torch.ones(of.bytes, dtype=torch.uint8).pin_memory()
        actions["pinned"] = on.timed(copying(pinned, plain))
    best = take_turns(actions, rounds)
    yield _row("device_to_host", best, "gather", "down", "copy_ to the host", of.bytes)
    yield _row("host_to_device", best, "scatter", "up", "copy_ from the host", of.bytes)
    yield _row("digest", best, "digest", "copy", "copy_ on the device", of.bytes)
    yield _row("digest_of_what_crosses", best, "digest", "down", "copy_ to the host", of.bytes)
    yield _row("copy_to_host", best, "down", "copy", "copy_ on the device", of.bytes)
    if on.crosses:
        yield _row("copy_to_pinned", best, "pinned", "down", "copy_ to the host", of.bytes)
    else:
        yield Skipped("copy_to_pinned", "the device is the host's memory")


def handoffs(on: Machine, shape: Callable[[str], Shape], rounds: int) -> Iterator[Row]:
    """Whole handoffs, over shared memory as on one host; digests on."""
    exact = ways = 0
    for name in ("nhd", "nz"):
        host, there = shape("host"), shape(name)
        sides = {"host": (host, _as_it_is), "device": (there, on.hold)}
        for source, target in (("host", "device"), ("device", "host")):
            seconds, right = hand_over(*sides[source], *sides[target], rounds)
            best = {"handoff": Best(seconds), **take_turns({"copy": crossing(on, host.bytes)}, rounds)}
            where = f"{source}_to_{name}" if target == "device" else f"{name}_to_{target}"
            yield _row(f"handoff_{where}", best, "handoff", "copy", "copy_ to the host", host.bytes)
            exact, ways = exact + right, ways + 1
    seconds, right = hand_over(shape("nhd"), on.hold, shape("hnd"), on.hold, rounds)
    exact, ways = exact + right, ways + 1
    yield Row("digests_equal", exact, "handoffs", "handoffs", ways, 1.0, "at least")


def hand_over(
    ours: Shape, held: Callable[[Cache], Cache], theirs: Shape, kept: Callable[[Cache], Cache], rounds: int
) -> tuple[float, bool]:
    """Seconds of the best of some handoffs, from when prefill has computed all until the blocks hold it; and whether
    all of them were exact."""
    blocks, other = ours.table(1), theirs.table(2)
    tokens = Chunk(0, ours.tokens)
    original = ours.hold(0, seed=1)
    expected = np.empty(original.values.wire_shape(ours.tokens), np.uint16)
    original.values.gather(blocks, tokens, expected)
    total = f"{digest.total(digest.tiles(tokens, expected, by='numpy')):016x}"
    a, b = Engine.start(ours, "prefill", 1, held), Engine.start(theirs, "decode", 2, kept)
    best, right = float("inf"), True
    try:
        agreement = negotiate(a.contract, b.contract)
        assert isinstance(agreement, Agreement), agreement
        for _ in range(rounds + 1):
            name = tickets.new_handoff()
            ticket = tickets.issue(name, a.contract, b.contract, agreement, int(SECONDS * 1000))
            a.open(ticket)
            b.load(tickets.mint(ticket, SECRET), other)
            began = time.monotonic()
            a.hand_over(ticket, blocks, began + SECONDS)
            reason = b.loaded(began + SECONDS)
            assert not reason, reason
            best = min(best, time.monotonic() - began)
            got = np.empty_like(expected)
            b.groups[0].values.gather(other, tokens, got)
            right = right and np.array_equal(got, expected) and _digests(a, b, name) == [total, total]
    finally:
        a.close()
        b.close()
    return best, right


def _digests(a: Engine, b: Engine, name: str) -> list[str]:
    """What each side's ledger says that it has handed over. The producer hears of the end a moment later."""
    until = time.monotonic() + SECONDS
    while True:
        records = [engine.endpoints[0]._ledger.get(name) for engine in (a, b)]
        found = [record.digest if record is not None else "" for record in records]
        if all(found) or time.monotonic() > until:
            return found
        time.sleep(0.001)


def copying(target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source)


def crossing(on: Machine, size: int) -> Callable[[], None]:
    return on.timed(copying(torch.ones(size, dtype=torch.uint8), on.empty(size)))


def _as_it_is(cache: Cache) -> Cache:
    return cache


def _row(name: str, best: dict[str, Best], value: str, mark: str, mark_name: str, size: int) -> Row:
    cost = None if best[value].cpu == float("inf") else best[value].cpu / size * 1e9
    marked = best[mark].per_second(size / 1e9)
    return Row(name, best[value].per_second(size / 1e9), UNIT, mark_name, marked, cpu_s_per_gb=cost)


def describe(on: Machine) -> dict[str, Any]:
    name = device.runtime(on.device).get_device_name(on.device) if on.crosses else "the host's memory"
    loops = "numba" if compiled.wanted() else "numpy"
    return {**machine(), "device": f"{on.device}: {name}", "torch": torch.__version__, "loops": loops}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="as torch names it")
    parser.add_argument("--tokens", type=int, default=4096, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--save", action="store_true", help="write it to benchmarks/results and README.md")
    arguments = parser.parse_args()
    on = Machine(torch.device(arguments.device))
    if on.crosses:
        torch.empty(1, device=on.device)  # a device that is not there says so here
    about = describe(on)
    compiled.warm()

    def shape(name: str) -> Shape:
        layout, block = LAYOUT_OF.get(name, HOST)
        return Shape(LAYOUTS[layout], block, arguments.tokens, arguments.layers, transport="shm")

    rows: list[Row | Skipped] = [*conversions(on, shape, arguments.rounds)]
    rows += [*crossings(on, shape("nhd"), arguments.rounds), *handoffs(on, shape, arguments.rounds)]
    result = {
        "machine": about,
        "rows": [row.as_json() for row in rows if isinstance(row, Row)],
        "skipped": [row.as_json() for row in rows if isinstance(row, Skipped)],
    }
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "device_handoff.json").write_text(json.dumps(result, indent=2) + "\n")
        write_table("device_handoff", result)
    print(json.dumps(result) if arguments.json else table(result["rows"]))
    return int(not rows[-1].met) if isinstance(rows[-1], Row) else 1


if __name__ == "__main__":
    # One thread on the host: what a handoff has, beside an engine that computes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    sys.exit(main())
