"""An engine with nothing in it but its KV cache: all its ranks, each with the endpoint that an engine plugin has.

`Prefill` is in this process; the decode engine is a process of its own, which `decode` runs. The ranks of an engine
share a process here, which those of a real one do not.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

import msgspec
import numpy as np

from deeplink.bench.child import Answer, Message
from deeplink.bench.memory import filled, memory
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.caches.group import Group
from deeplink.kvconnector.contracts import contract as contracts
from deeplink.kvconnector.contracts.contract import CacheGroup, Contract, Model, Rank
from deeplink.kvconnector.endpoint import Endpoint, Settings
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.handoffs.order import Order
from deeplink.kvconnector.handoffs.ticket import Ticket
from deeplink.kvconnector.layouts.layout import Layout
from deeplink.kvconnector.relayout.plan import Chunk
from deeplink.kvconnector.transport.start import Transports

SECRET = b"a secret for benchmarks, 32 byte"
PROMPT = b"prompt"
FACTORIES = {
    "tcp": "deeplink.kvconnector.transport.tcp:TcpTransport",
    "shm": "deeplink.kvconnector.transport.shm:ShmTransport",
}
LOOK, LATE = 5e-4, 2e-3
"""Seconds between two looks of the decode engine's loop at what has ended; or that share of the time so far."""


@dataclass(frozen=True)
class Shape:
    """The cache of one side, in 16-bit elements, and how it is served. With `digest` what arrives is verified.

    `staging` and `chunk` are the defaults of deeplink.toml.
    """

    layout: str
    block_size: int
    tokens: int
    layers: int = 16
    heads: int = 8
    dim: int = 128
    tp: int = 1
    transport: str = "tcp"
    host: str = "127.0.0.1"
    digest: bool = True
    staging: int = 256 << 20
    chunk: int = 8 << 20

    @property
    def blocks(self) -> int:
        return self.tokens // self.block_size

    @property
    def bytes(self) -> int:
        """Of all tokens."""
        return self.tokens * self.layers * self.heads * self.dim * 4

    @property
    def group(self) -> CacheGroup:
        layers = tuple(range(self.layers))
        return CacheGroup("full", layers, self.heads, self.dim, "bfloat16", self.block_size, self.layout)

    def table(self, seed: int) -> list[int]:
        """The blocks in an order that has no neighbours in it but by chance."""
        return [int(block) for block in np.random.default_rng(seed).permutation(self.blocks)]

    def contract(self, role: str, epoch: str, ranks: tuple[Rank, ...]) -> Contract:
        model = Model("LlamaForCausalLM", self.layers, 32000, "{}", "none", "w")
        return Contract("bench", "0", "cpu", role, epoch, model, (self.group,), ranks)

    def hold(self, rank: int, seed: int) -> Group:
        """The cache of one rank, full of random bytes."""
        heads = self.heads * rank // self.tp, self.heads * (rank + 1) // self.tp
        bound = Layout.parse(self.layout).bind(
            heads=heads[1] - heads[0], head_dim=self.dim, block_size=self.block_size, blocks=self.blocks
        )
        rng = np.random.default_rng([seed, rank])
        sizes = [bound.elements(tensor) for tensor in range(bound.tensors)] * self.layers
        cache = Cache(tuple(filled(memory((size,)), rng) for size in sizes), bound)
        return Group(self.group, tuple(range(self.layers)), heads, cache)


@dataclass
class Engine:
    shape: Shape
    contract: Contract
    groups: list[Group]
    endpoints: list[Endpoint]
    threads: list[threading.Thread] = field(default_factory=list)

    @staticmethod
    def start(shape: Shape, role: str, seed: int, held: Callable[[Cache], Cache] = lambda cache: cache) -> Engine:
        """`held` says how the engine holds its cache, which is made in host memory."""
        epoch = f"{role}-{tickets.new_handoff()}"
        settings = Settings(shape.host, shape.staging, shape.chunk, shape.digest)
        groups, endpoints = [], []
        for place in range(shape.tp):
            group = shape.hold(place, seed)
            group = replace(group, values=held(group.values))

            def state(channel: str, addresses: dict[str, str], place: int = place, group: Group = group) -> Contract:
                rank = Rank(place, 0, 0, (group.heads,), (0, shape.layers), channel, addresses)
                return shape.contract(role, epoch, (rank,))

            names = {"tcp", shape.transport}
            running = {name: resolve_name(FACTORIES[name])(shape.host, SECRET) for name in sorted(names)}
            endpoints.append(Endpoint((group,), settings, SECRET, epoch, Transports(running), state, place))
            groups.append(group)
        ranks = tuple(endpoint.contract.ranks[0] for endpoint in endpoints)
        return Engine(shape, shape.contract(role, epoch, ranks), groups, endpoints)

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()

    def checksum(self, table: Sequence[int]) -> int:
        """Of every token's K and V in logical order, whatever the layout and the number of ranks."""
        total = 0
        for group in self.groups:
            cache = group.values
            wire = np.empty(cache.wire_shape(self.shape.tokens), cache.dtype)
            cache.gather(table, Chunk(0, self.shape.tokens), wire)
            for (layer, side, head), lane in _lanes(wire):
                place = f"{layer} {side} {group.heads[0] + head}".encode()
                total += zlib.crc32(lane.data, zlib.crc32(place))
        return total

    # -- prefill ---------------------------------------------------------------------------------------------

    def open(self, ticket: Ticket) -> None:
        for endpoint in self.endpoints:
            endpoint.producer.open(ticket, PROMPT, self.shape.tokens)

    def hand_over(self, ticket: Ticket, table: Sequence[int], deadline: float) -> None:
        """Prefill has computed all tokens: stage them, each rank in its own thread, until no block is needed."""
        others = [
            threading.Thread(target=_stage, args=(endpoint, ticket, table, self.shape.tokens, deadline))
            for endpoint in self.endpoints[1:]
        ]
        for thread in others:
            thread.start()
        _stage(self.endpoints[0], ticket, table, self.shape.tokens, deadline)
        for thread in others:
            thread.join()

    # -- decode ----------------------------------------------------------------------------------------------

    def load(self, text: str, table: Sequence[int]) -> None:
        order = Order("bench", tickets.verify(text, SECRET), text, PROMPT, 0, self.shape.tokens, (table,))
        for endpoint in self.endpoints:
            endpoint.consumer.load(order)

    def loaded(self, deadline: float) -> str:
        """Once every rank's load has ended: the first reason why one did not end well, or nothing."""
        reasons = []
        began = time.monotonic()
        for endpoint in self.endpoints:
            while not (outcomes := endpoint.consumer.collect()):
                now = time.monotonic()
                if now > deadline:
                    return "the load did not end"
                # Looking costs CPU time that is not the handoff's, and looking late adds to what it takes.
                time.sleep(max(LOOK, (now - began) * LATE))
            reasons += [f"{o.reason.code}: {o.reason.message}" for o in outcomes if o.reason is not None]
        return reasons[0] if reasons else ""


def _lanes(wire: np.ndarray[Any, Any]) -> list[tuple[tuple[int, ...], np.ndarray[Any, Any]]]:
    return [(place, wire[place]) for place in np.ndindex(wire.shape[:3])]


def _stage(endpoint: Endpoint, ticket: Ticket, table: Sequence[int], tokens: int, deadline: float) -> None:
    endpoint.producer.fill(ticket.handoff, (table,), tokens)
    while not endpoint.producer.settled(ticket.handoff):
        if time.monotonic() > deadline:
            raise TimeoutError("the blocks are still needed")
        endpoint.producer.pump()
        time.sleep(LOOK)


def decode(shape: str) -> Answer:
    """The decode engine's process. A question has `do`: contract, load, loaded, checksum, or stages."""
    from deeplink.bench.stages import Stages  # what is measured there is what is imported here

    engine = Engine.start(Shape(**msgspec.json.decode(shape)), "decode", seed=2)
    stages = Stages()

    def answer(question: Message) -> Message:
        act: dict[str, Callable[[], Message]] = {
            "contract": lambda: {"contract": contracts.to_json(engine.contract).decode()},
            "load": lambda: _load(engine, question),
            "loaded": lambda: {"reason": engine.loaded(question["deadline"]), "at": time.monotonic()},
            "checksum": lambda: {"checksum": engine.checksum(question["table"])},
            "stages": lambda: _stages(stages, question["on"]),
        }
        return act[question["do"]]()

    return answer


def _load(engine: Engine, question: Message) -> Message:
    engine.load(question["ticket"], question["table"])
    return {}


def _stages(stages: Any, on: bool) -> Message:
    if on:
        stages.begin()
        return {}
    return {"stages": stages.end()}


def encode(shape: Shape) -> str:
    return msgspec.json.encode(asdict(shape)).decode()
