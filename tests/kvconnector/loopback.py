"""Two endpoints over loopback sockets, with caches of unlike layout, and no engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.caches.group import Group
from deeplink.kvconnector.contracts.contract import CacheGroup, Contract, Model, Rank
from deeplink.kvconnector.endpoint import Endpoint, Settings
from deeplink.kvconnector.handoffs.handoff import Record
from deeplink.kvconnector.handoffs.order import Order, Outcome
from deeplink.kvconnector.handoffs.ticket import Ticket, mint, new_handoff
from deeplink.kvconnector.layouts.layout import Layout
from deeplink.kvconnector.relayout.convert import storage_dtype
from deeplink.kvconnector.relayout.plan import Chunk
from deeplink.kvconnector.transport.base import Link, Push, Transport
from deeplink.kvconnector.transport.shm import ShmTransport
from deeplink.kvconnector.transport.start import Transports
from deeplink.kvconnector.transport.tcp import TcpTransport

SECRET = b"a secret for tests only, 32 byte"
LAYERS, HEADS, DIM, BLOCKS = 3, 2, 32, 24

VEC = "block head (k: dim token | v: token dim)"
AMX = "block head (k: token/16 dim/2 token%16 dim%2 | v: dim/16 token/2 dim%16 token%2)"
NHD = "block token head (kv dim)"
HND = "block head token (kv dim)"
NZ = "kv block (head dim)/16 token (head dim)%16"
SLOTS = "kv | slot head dim"


def make_cache(layout: str, block_size: int, dtype: str = "float32", *, seed: int = 0) -> Cache:
    bound = Layout.parse(layout).bind(heads=HEADS, head_dim=DIM, block_size=block_size, blocks=BLOCKS)
    rng = np.random.default_rng(seed)
    sizes = [bound.elements(tensor) for tensor in range(bound.tensors)] * LAYERS
    layers = [rng.integers(0, 1 << 16, size).astype(storage_dtype(dtype)) for size in sizes]
    return Cache(tuple(layers), bound)


def make_contract(
    epoch: str, role: str, group: CacheGroup, *, weights: str = "w", channel: str = "", **transports: str
) -> Contract:
    model = Model("LlamaForCausalLM", LAYERS, 100, "{}", "none", weights)
    rank = Rank(0, 0, 0, ((0, HEADS),), (0, LAYERS), channel, transports)
    return Contract("test", "0", "cpu", role, epoch, model, (group,), (rank,))


def read(cache: Cache, table: Sequence[int], start: int, stop: int) -> np.ndarray:
    """Tokens ``[start, stop)`` in wire form."""
    wire = np.empty(cache.wire_shape(stop - start), cache.dtype)
    cache.gather(table, Chunk(start, stop), wire)
    return wire


class Meddling(TcpTransport):
    """A transport whose pushes pass through `meddle` first: it may change them, wait, or raise."""

    meddle: Callable[[Sequence[Push]], Sequence[Push]] = staticmethod(lambda pushes: pushes)

    def connect(self, address: str, deadline: float) -> Link:
        return _MeddlingLink(super().connect(address, deadline), self)


@dataclass(eq=False)
class _MeddlingLink:
    link: Link
    owner: Meddling

    def push(self, pushes: Sequence[Push], deadline: float) -> None:
        self.link.push(self.owner.meddle(pushes), deadline)

    def close(self) -> None:
        self.link.close()


class Gate:
    """A `meddle` that lets `passes` pushes through and holds the next until `open`."""

    def __init__(self, passes: int = 0) -> None:
        self.passes = passes
        self.reached = threading.Event()
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def __call__(self, pushes: Sequence[Push]) -> Sequence[Push]:
        if self.passes == 0:
            self.reached.set()
            assert self._open.wait(30)
        else:
            self.passes -= 1
        return pushes


def make_group(layout: str, block_size: int, dtype: str = "float32") -> CacheGroup:
    return CacheGroup("full", tuple(range(LAYERS)), HEADS, DIM, dtype, block_size, layout)


@dataclass
class Side:
    epoch: str
    cache: Cache
    endpoint: Endpoint
    transport: Meddling

    def record(self, ticket: Ticket) -> Record | None:
        return self.endpoint._ledger.get(ticket.handoff)


@dataclass
class Pair:
    """A prefill side and a decode side."""

    producer: Side
    consumer: Side
    _collected: list[Outcome] = field(default_factory=list)

    def close(self) -> None:
        self.producer.endpoint.close()
        self.consumer.endpoint.close()

    def open(self, ticket: Ticket, tokens: int, prompt: bytes = b"prompt") -> None:
        self.producer.endpoint.producer.open(ticket, prompt, tokens)

    def fill(self, ticket: Ticket, table: Sequence[int], computed: int) -> None:
        self.producer.endpoint.producer.fill(ticket.handoff, (table,), computed)

    def load(self, order: Order) -> None:
        self.consumer.endpoint.consumer.load(order)

    def pump(self, ticket: Ticket, seconds: float = 20.0) -> None:
        """Go on staging until the producer's blocks are no longer needed."""
        deadline = time.monotonic() + seconds
        while not self.producer.endpoint.producer.settled(ticket.handoff):
            assert time.monotonic() < deadline, "the producer's blocks are still needed"
            self.producer.endpoint.producer.pump()
            time.sleep(0.002)

    def hand_over(self, tokens: int, ours: list[int], theirs: list[int]) -> None:
        """One whole handoff that ends well, of blocks `ours` to blocks `theirs`."""
        ticket, text = self.ticket()
        self.open(ticket, tokens)
        self.load(self.order(ticket, text, theirs, tokens))
        self.fill(ticket, ours, tokens)
        self.pump(ticket)
        outcome = self.outcome()
        assert outcome.reason is None, outcome.reason
        self.settle(ticket, "drained", "loaded")

    def ticket(self, seconds: float = 10.0, **changes: object) -> tuple[Ticket, str]:
        values = {
            "handoff": new_handoff(),
            "producer": self.producer.epoch,
            "consumer": self.consumer.epoch,
            "channels": (self.producer.endpoint.contract.ranks[0].channel,),
            "milliseconds": max(1, int(seconds * 1000)),
        }
        ticket = Ticket(**{**values, **changes})  # type: ignore[arg-type]
        return ticket, mint(ticket, SECRET)

    def order(
        self,
        ticket: Ticket,
        text: str,
        table: Sequence[int],
        stop: int,
        *,
        start: int = 0,
        prompt: bytes = b"prompt",
        request: str = "request",
        first: bool = False,
    ) -> Order:
        return Order(request, ticket, text, prompt, start, stop, (table,), first)

    def outcome(self, seconds: float = 10.0) -> Outcome:
        """The one load that ends within the deadline."""
        outcome = self.one(seconds)
        assert not self._collected
        return outcome

    def one(self, seconds: float = 10.0) -> Outcome:
        """The next of several loads that end."""
        deadline = time.monotonic() + seconds
        while not self._collected:
            assert time.monotonic() < deadline, "the load did not end"
            self._collected += self.consumer.endpoint.consumer.collect()
            time.sleep(0.002)
        return self._collected.pop(0)

    def settle(self, ticket: Ticket, producer: str | None, consumer: str | None) -> tuple[Record | None, Record | None]:
        """Nothing is held, nothing more comes, and each side has this one final state (None: never heard of it)."""
        self.quiet()
        self._collected += self.consumer.endpoint.consumer.collect()
        assert self._collected == []
        records = self.producer.record(ticket), self.consumer.record(ticket)
        states = tuple(record.state if record is not None else None for record in records)
        assert states == (producer, consumer), records
        return records

    def quiet(self, seconds: float = 10.0) -> None:
        """Nothing is held on either side, within the deadline."""
        deadline = time.monotonic() + seconds
        while True:
            held = [
                (side._outgoing.used, side._incoming.used, side._ledger.open, side.producer.claims)
                for side in (self.producer.endpoint, self.consumer.endpoint)
            ]
            if held == [(0, 0, 0, 0)] * 2:
                return
            assert time.monotonic() < deadline, f"still held: {held}"
            time.sleep(0.005)


def start_others(agreed: str) -> dict[str, Transport]:
    """What a side needs beside tcp for two of them to agree on this one."""
    return {"shm": ShmTransport("127.0.0.1", SECRET)} if agreed == "shm" else {}


def make_side(
    role: str,
    layout: str,
    block_size: int,
    *,
    dtype: str = "float32",
    weights: str = "w",
    seed: int = 0,
    staging: int = 1 << 20,
    chunk: int = 64 << 10,
    verify: bool = True,
    every: int = 1,
    secret: bytes = SECRET,
    epoch: str = "",
    others: Mapping[str, Transport] | None = None,
    held: Callable[[Cache], Cache] = lambda cache: cache,
) -> Side:
    """`held` says how the engine holds its cache, which is made in host memory."""
    epoch = epoch or f"{role}-{new_handoff()}"
    cache = held(make_cache(layout, block_size, dtype, seed=seed))
    group = make_group(layout, block_size, dtype)

    def state(channel: str, transports: dict[str, str]) -> Contract:
        return make_contract(epoch, role, group, weights=weights, channel=channel, **transports)

    settings = Settings("127.0.0.1", staging, chunk, verify, every=every)
    transport = Meddling("127.0.0.1", secret)
    transports = Transports({**(others or {}), "tcp": transport})
    return Side(
        epoch,
        cache,
        Endpoint((Group(group, tuple(range(LAYERS)), (0, HEADS), cache),), settings, secret, epoch, transports, state),
        transport,
    )


def make_pair(producer: dict[str, Any] | None = None, consumer: dict[str, Any] | None = None) -> Pair:
    """A prefill side with the CPU's layout and a decode side with a GPU's; the arguments go to `make_side`."""
    return Pair(
        make_side(**{"role": "prefill", "layout": VEC, "block_size": 64, "seed": 1, **(producer or {})}),
        make_side(**{"role": "decode", "layout": HND, "block_size": 128, "seed": 2, **(consumer or {})}),
    )
