"""Caches that are torch tensors on a device, beside the same in host memory: bit-equal, and whole handoffs.

Needs no test framework, because an engine's Python runs it, where there is torch but no pytest:

    python device_check.py
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from fake_device import Streams, installed
from loopback import HND, NHD, NZ, SECRET, SLOTS, VEC, Pair, make_pair
from loopback import read as read_cache
from relayout_check import guarded, intact
from world import Engine, Shape, hand_over, read

from deeplink.errors import HandoffError, LayoutError
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.caches.device_cache import DeviceCache, host_array, of_tensors
from deeplink.kvconnector.contracts.contract import CacheGroup, Scales
from deeplink.kvconnector.layouts.layout import Layout
from deeplink.kvconnector.relayout import device
from deeplink.kvconnector.relayout.plan import Chunk
from deeplink.kvconnector.transport.shm import ShmTransport

replace = msgspec.structs.replace
LAYERS = 2
TOKENS = 333
KINDS = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}


def on_device(cache: Cache) -> Cache:
    """The same bytes as tensors, of more axes than one."""
    tensors = [
        torch.frombuffer(layer.view("u1"), dtype=torch.uint8).view(KINDS[layer.itemsize]).view(2, -1)
        if layer.size % 2 == 0
        else torch.frombuffer(layer.view("u1"), dtype=torch.uint8).view(KINDS[layer.itemsize])
        for layer in cache.layers
    ]
    made = of_tensors(tensors, cache.bound)
    assert isinstance(made, DeviceCache)
    assert made.dtype == cache.dtype
    assert made.token_bytes == cache.token_bytes
    return made


# -- one example of the property test ------------------------------------------------------------------------------


_ENTERED = contextlib.ExitStack()
"""Until the process ends."""


def examples() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers whether one example holds."""
    _ENTERED.enter_context(installed())

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        # So that the way in pieces is taken too.
        device.SCRATCH = question.pop("scratch")
        return {"wrong": same(**question)}

    return answer


def same(
    text: str,
    heads: int,
    dim: int,
    block_size: int,
    blocks: int,
    itemsize: int,
    table: list[int],
    chunk: list[int],
    wanted: list[int],
    seed: int,
    read_only: bool,
) -> str:
    """What a device does otherwise than numpy; "" when it is nothing."""
    bound = Layout.parse(text).bind(heads=heads, head_dim=dim, block_size=block_size, blocks=blocks)
    sizes = [bound.elements(tensor) for tensor in range(bound.tensors)] * LAYERS
    ours, theirs = ([guarded(size, itemsize, 0, seed + place) for place, size in enumerate(sizes)] for _ in range(2))
    host = Cache(tuple(inside for inside, _ in ours), bound)
    other = on_device(Cache(tuple(inside for inside, _ in theirs), bound))
    whole, part = Chunk(*chunk), Chunk(*wanted)
    wires = [np.full(host.wire_shape(whole.tokens), 7, host.dtype) for _ in range(2)]
    host.gather(table, whole, wires[0])
    other.gather(table, whole, wires[1])
    if not np.array_equal(*wires):
        return "gather"
    wire = np.random.default_rng(seed).integers(0, 256, wires[0].nbytes, np.uint8).view(host.dtype)
    wire = wire.reshape(host.wire_shape(whole.tokens))
    wire.flags.writeable = not read_only
    host.scatter(wire, whole.start, table, part)
    other.as_of_now().scatter(wire, whole.start, table, part)
    if not all(np.array_equal(a, b) for (a, _), (b, _) in zip(ours, theirs, strict=True)):
        return "scatter"
    return "" if all(intact(*each) for each in theirs) else "memory around the cache"


# -- whole handoffs ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def pairs(**sides: dict[str, object]) -> Iterator[Pair]:
    pair = make_pair(**sides)  # type: ignore[arg-type]
    try:
        yield pair
    finally:
        pair.close()


LAYOUTS = [(NHD, 16, HND, 128), (VEC, 64, NHD, 16), (NZ, 48, SLOTS, 1), (HND, 16, NZ, 32)]


def between_layouts(streams: Streams) -> int:
    """From a device to the host, back again, and between devices: the same bits, and no others written."""
    count = 0
    for dtype in ("bfloat16", "float32"):
        for ours, size, theirs, other in LAYOUTS:
            tables = _table(size), _table(other)
            for held, kept in ((True, False), (False, True), (True, True)):
                with pairs(producer=_side(ours, size, dtype, held), consumer=_side(theirs, other, dtype, kept)) as pair:
                    _check_one(pair, tables)
                    count += 1
    with pairs(
        producer={**_side(NHD, 16, "bfloat16", True), "others": {"shm": ShmTransport("127.0.0.1", SECRET)}},
        consumer={**_side(HND, 32, "bfloat16", True), "others": {"shm": ShmTransport("127.0.0.1", SECRET)}},
    ) as pair:  # out of lent memory, which is read-only
        _check_one(pair, (_table(16), _table(32)))
    return count + 1


def _side(layout: str, block_size: int, dtype: str, on: bool) -> dict[str, object]:
    return {"layout": layout, "block_size": block_size, "dtype": dtype, "held": on_device if on else _as_it_is}


def _as_it_is(cache: Cache) -> Cache:
    return cache


def _table(block_size: int) -> list[int]:
    """All 24 blocks of the loopback's caches, out of order."""
    return np.random.default_rng(block_size).permutation(24).tolist()


def _check_one(pair: Pair, tables: tuple[list[int], list[int]]) -> None:
    ours, theirs = tables
    sizes = [side.cache.bound.block_size * 24 for side in (pair.producer, pair.consumer)]
    tokens = min(*sizes, TOKENS)
    everything = sizes[1]
    before = read_cache(pair.consumer.cache, theirs, 0, everything)
    expected = read_cache(pair.producer.cache, ours, 0, tokens)
    pair.hand_over(tokens, ours, theirs)
    after = read_cache(pair.consumer.cache, theirs, 0, everything)
    np.testing.assert_array_equal(after[:, :, :, :tokens], expected)
    np.testing.assert_array_equal(after[:, :, :, tokens:], before[:, :, :, tokens:])


FULL = CacheGroup("full", (0, 3), 4, 16, "bfloat16", 16, NHD)
SLIDING = CacheGroup("sliding", (1, 2), 4, 16, "bfloat16", 16, NHD, window=40)
ROWS = Scales("token-head", layout="block token head kv dim")


def of_many_kinds(streams: Streams) -> int:
    """Windows, unequal ranks and casts: what lands from a device is what lands from host memory, bit by bit."""
    cases: list[tuple[tuple[CacheGroup, ...], tuple[CacheGroup, ...], int, int, tuple[str, ...]]] = []
    window = tuple(replace(group, layout=HND, block_size=32) for group in (FULL, SLIDING))
    cases += [((FULL, SLIDING), window, 1, 1, ()), ((FULL, SLIDING), window, 2, 1, ()), ((FULL,), window[:1], 1, 2, ())]
    for source, target in (("bfloat16", "float16"), ("bfloat16", "float32"), ("float32", "bfloat16")):
        a = replace(FULL, dtype=source)
        cases.append(((a,), (replace(a, dtype=target, layout=VEC, block_size=32),), 1, 1, ("*->*",)))
    a = replace(FULL, dtype="bfloat16")
    rows = replace(a, dtype="int8", scales=ROWS, layout=HND, block_size=32)
    cases += [((a,), (rows,), 1, 1, ()), ((rows,), (replace(rows, layout=NHD, block_size=16),), 1, 1, ())]
    eight = replace(a, dtype="float8_e4m3fn", scales=Scales("tensor", (0.5,) * 4))
    cases.append(((eight,), (replace(a, layout=HND, block_size=64),), 1, 1, ()))
    for ours, theirs, tp, other, _ in cases:
        consent = tuple(f"{b.dtype}->{c.dtype}" for b, c in zip(ours, theirs, strict=True) if b.dtype != c.dtype)
        results = [_landed(ours, theirs, tp, other, consent, kept) for kept in (_as_it_is, on_device)]
        for expected, got in zip(*results, strict=True):
            np.testing.assert_array_equal(got, expected)
    return len(cases)


def _landed(
    ours: tuple[CacheGroup, ...],
    theirs: tuple[CacheGroup, ...],
    tp: int,
    other: int,
    consent: tuple[str, ...],
    kept: Callable[[Cache], Cache],
) -> list[np.ndarray]:
    with contextlib.ExitStack() as stack:
        a = Engine.start(Shape(ours, tp), "prefill", 1, casts=consent, kept=kept)
        stack.callback(a.close)
        b = Engine.start(Shape(theirs, other), "decode", 2, casts=consent, kept=kept)
        stack.callback(b.close)
        tables = [[5, 2, 9, 0, 7, 11, 3]] * len(ours), [[3, 1, 8, 6, 2, 12, 4]] * len(theirs)
        hand_over(a, b, 101, *tables)
        found = [read(held, index, tables[1][index], 0, 112) for held in b.held for index in range(len(theirs))]
        for held in b.held:
            for index, group in enumerate(held):
                if group.scales is not None:
                    found.append(read_cache(group.scales, tables[1][index], 0, 112))
        return found


# -- who waits for whom --------------------------------------------------------------------------------------------


def after_what_is_under_way(streams: Streams) -> int:
    """A forward pass that was launched before `fill` is staged; what was launched on the consumer's blocks before
    `load` does not write over what lands; what the engine launches after the end sees it."""
    with pairs(producer=_side(NHD, 16, "bfloat16", True), consumer=_side(HND, 32, "bfloat16", True)) as pair:
        ours, theirs = _table(16), _table(32)
        source, target = pair.producer.cache, pair.consumer.cache
        ticket, text = pair.ticket()
        tokens = 160
        pair.open(ticket, tokens)
        engine, other = streams.Stream(), streams.Stream()
        seen: list[bool] = []

        def forward() -> None:
            for layer in source.layers:
                layer.view(torch.int16).add_(1)

        def last_step() -> None:
            for layer in target.layers:
                layer.view(torch.int16).fill_(77)

        with streams.stream(other):
            other.put(last_step)
            pair.load(pair.order(ticket, text, theirs, tokens))
        with streams.stream(engine):
            engine.put(forward)
            pair.fill(ticket, ours, tokens)
            pair.pump(ticket)
        assert pair.outcome().reason is None
        expected = read_cache(source, ours, 0, tokens)
        other.put(lambda: seen.append(np.array_equal(read_cache(target, theirs, 0, tokens), expected)))
        other.synchronize()
        assert (engine.done, other.done, seen) == (1, 2, [True])
        pair.settle(ticket, "drained", "loaded")
    return 1


def without_memory(streams: Streams) -> int:
    """A device that has no memory left for the copies ends the handoff by its name, on either side; nothing is held."""
    for side in ("producer", "consumer"):
        with pairs(producer=_side(NHD, 16, "bfloat16", True), consumer=_side(HND, 32, "bfloat16", True)) as pair:
            ours, theirs = _table(16), _table(32)
            ticket, text = pair.ticket()
            pair.open(ticket, 64)
            pair.load(pair.order(ticket, text, theirs, 64))
            cross = device._cross

            def full(*arguments: Any, side: str = side, cross: Any = cross) -> None:
                if arguments[4] == {"producer": "wire", "consumer": "blocks"}[side]:
                    raise torch.cuda.OutOfMemoryError("out of memory")
                cross(*arguments)

            device._cross = full
            try:
                pair.fill(ticket, ours, 64)
                reason = pair.outcome().reason
            finally:
                device._cross = cross
            assert reason is not None
            assert (reason.code, reason.field) == (HandoffError.code, "device"), reason
            pair.quiet()
    return 2


def refused() -> int:
    """What is no cache, by the field."""
    bound = Layout.parse(NHD).bind(heads=2, head_dim=32, block_size=16, blocks=4)
    size = bound.elements()
    good = torch.zeros(size, dtype=torch.bfloat16)
    cases: list[tuple[list[Any], str]] = [
        ([torch.zeros(size - 1, dtype=torch.bfloat16)], "shape"),
        ([good, torch.zeros(size, dtype=torch.float32)], "device"),
        ([good, good.to("meta")], "device"),
        ([good.to("meta")], "device"),  # has no bytes, and nothing to wait for
        ([torch.zeros(size, dtype=torch.float64)], "dtype"),
    ]
    assert [_field(of_tensors, tensors, bound) for tensors, _ in cases] == [field for _, field in cases]
    # In host memory it is the same memory, for the compiled loops.
    held = of_tensors([good.view(4, 2, -1).transpose(0, 1)], bound)
    assert type(held) is Cache
    held.layers[0][5] = 0x3F80
    assert good[5] == 1.0
    return len(cases)


def in_host_memory() -> int:
    tensor = torch.zeros(4, 2, 6, dtype=torch.bfloat16)
    host_array("a", tensor, (4, 2, 6))[13] = 0x3F80
    assert tensor[1, 0, 1] == 1.0
    cases: list[tuple[Any, str]] = [
        (tensor.view(2, 4, 6), "strides"),
        (tensor.transpose(1, 2).contiguous().transpose(1, 2), "strides"),  # of that shape, and not dense
        (tensor.to("meta"), "device"),
    ]
    assert [_field(host_array, "a", given, (4, 2, 6)) for given, _ in cases] == [field for _, field in cases]
    return len(cases)


def _field(call: Callable[..., object], *arguments: object) -> str:
    try:
        call(*arguments)
    except LayoutError as exc:
        return exc.field
    return "not refused"


CHECKS = (between_layouts, of_many_kinds, after_what_is_under_way, without_memory)


def main() -> None:
    torch.set_num_threads(1)
    assert refused()
    assert in_host_memory()
    with installed() as streams:
        for check in CHECKS:
            print(f"{check(streams)} of {check.__name__}")


if __name__ == "__main__":
    sys.exit(main())
