"""Engines of several ranks and cache groups, with nothing in them but their caches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from loopback import SECRET

from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.caches.group import Group
from deeplink.kvconnector.contracts import negotiate as negotiations
from deeplink.kvconnector.contracts.contract import CacheGroup, Contract, Model, Rank
from deeplink.kvconnector.contracts.forms import SCHEMES, TOKEN_HEAD
from deeplink.kvconnector.contracts.negotiate import Agreement
from deeplink.kvconnector.endpoint import Endpoint, Settings
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.handoffs.order import Order, Outcome
from deeplink.kvconnector.handoffs.ticket import Ticket
from deeplink.kvconnector.layouts.layout import Layout
from deeplink.kvconnector.relayout.plan import Chunk
from deeplink.kvconnector.transport.start import Transports
from deeplink.kvconnector.transport.tcp import TcpTransport

Tables = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Shape:
    """How an engine is cut into ranks, and what it caches."""

    groups: tuple[CacheGroup, ...]
    tp: int = 1
    pp: int = 1
    blocks: int = 24

    @property
    def layers(self) -> int:
        return 1 + max(layer for group in self.groups for layer in group.layers)

    def ranks(self, dp: int = 0) -> tuple[Rank, ...]:
        cuts = [self.layers * place // self.pp for place in range(self.pp + 1)]
        return tuple(
            Rank(
                tp,
                pp,
                dp,
                tuple(self._heads(group, tp) for group in self.groups),
                (cuts[pp], cuts[pp + 1]),
                "",
                {"tcp": ""},
            )
            for pp in range(self.pp)
            for tp in range(self.tp)
        )

    def _heads(self, group: CacheGroup, tp: int) -> tuple[int, int]:
        """Contiguous shards; with more ranks than heads, copies."""
        first = group.heads * tp // self.tp
        return first, max(first + 1, group.heads * (tp + 1) // self.tp)

    def contract(self, role: str, epoch: str, casts: tuple[str, ...] = ()) -> Contract:
        model = Model("LlamaForCausalLM", self.layers, 100, "{}", "none", "w")
        return Contract("test", "0", "cpu", role, epoch, model, self.groups, self.ranks(), casts)

    def hold(self, rank: Rank, seed: int) -> tuple[Group, ...]:
        """The caches of one rank, full of random bits that are finite numbers of any type."""
        return tuple(self._group(spec, rank, index, seed) for index, spec in enumerate(self.groups))

    def _group(self, spec: CacheGroup, rank: Rank, index: int, seed: int) -> Group:
        heads = rank.heads[index]
        layers = tuple(layer for layer in spec.layers if rank.layers[0] <= layer < rank.layers[1])
        rng = np.random.default_rng([seed, index])
        values = _cache(spec.layout, spec, heads, spec.head_dim, len(layers), self.blocks, spec.dtype, rng)
        scales = None
        if SCHEMES.get(spec.dtype) == TOKEN_HEAD:
            assert spec.scales is not None
            scales = _cache(spec.scales.layout, spec, heads, 1, len(layers), self.blocks, "float32", rng)
        return Group(spec, layers, heads, values, scales)


def _cache(
    layout: str,
    spec: CacheGroup,
    heads: tuple[int, int],
    dim: int,
    layers: int,
    blocks: int,
    dtype: str,
    rng: np.random.Generator,
) -> Cache:
    bound = Layout.parse(layout).bind(
        heads=heads[1] - heads[0], head_dim=dim, block_size=spec.block_size, blocks=blocks
    )
    sizes = [bound.elements(tensor) for tensor in range(bound.tensors)] * layers
    return Cache(tuple(finite(rng, size, dtype) for size in sizes), bound)


def finite(rng: np.random.Generator, size: int, dtype: str) -> np.ndarray[Any, Any]:
    """Codes of moderate numbers of a type, of every sign and many magnitudes."""
    normal = rng.standard_normal(size).astype(np.float32)
    if dtype == "float32":
        return normal.view(np.uint32)
    if dtype == "bfloat16":
        return (normal.view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "float16":
        return normal.astype(np.float16).view(np.uint16)
    # From 1 on: -0 in the type that has none is its NaN.
    return rng.integers(1, 0x70, size, np.uint8) | (rng.integers(0, 2, size, np.uint8) << 7)


def read(groups: Sequence[Group], index: int, table: Sequence[int], start: int, stop: int) -> np.ndarray[Any, Any]:
    """Tokens of one cache group of one rank, in canonical form."""
    cache = groups[index].values
    wire = np.empty(cache.wire_shape(stop - start), cache.dtype)
    cache.gather(table, Chunk(start, stop), wire)
    return wire


@dataclass
class Engine:
    """All ranks of an engine, each with its endpoint."""

    shape: Shape
    contract: Contract
    held: list[tuple[Group, ...]]
    endpoints: list[Endpoint]
    outcomes: list[list[Outcome]] = field(default_factory=list)

    @staticmethod
    def start(
        shape: Shape,
        role: str,
        seed: int,
        *,
        casts: tuple[str, ...] = (),
        staging: int = 4 << 20,
        chunk: int = 64 << 10,
        transport: type[TcpTransport] = TcpTransport,
        epoch: str = "",
        kept: Callable[[Cache], Cache] = lambda cache: cache,
    ) -> Engine:
        """`kept` says how the engine holds its caches, which are made in host memory."""
        epoch = epoch or f"{role}-{tickets.new_handoff()}"
        whole = shape.contract(role, epoch, casts)
        settings = Settings("127.0.0.1", staging, chunk, True)
        held, endpoints, ranks = [], [], []
        for place, rank in enumerate(shape.ranks()):
            groups = tuple(
                replace(group, values=kept(group.values), scales=group.scales and kept(group.scales))
                for group in shape.hold(rank, seed)
            )

            def state(channel: str, addresses: dict[str, str], rank: Rank = rank) -> Contract:
                mine = msgspec.structs.replace(rank, channel=channel, transports=addresses)
                return msgspec.structs.replace(whole, ranks=(mine,))

            transports = Transports({"tcp": transport("127.0.0.1", SECRET)})
            endpoint = Endpoint(groups, settings, SECRET, epoch, transports, state, place)
            held.append(groups)
            endpoints.append(endpoint)
            ranks += endpoint.contract.ranks
        return Engine(shape, msgspec.structs.replace(whole, ranks=tuple(ranks)), held, endpoints)

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()

    def open(self, ticket: Ticket, tokens: int) -> None:
        for endpoint in self.endpoints:
            endpoint.producer.open(ticket, b"prompt", tokens)

    def fill(self, ticket: Ticket, tables: Tables, computed: int) -> None:
        for endpoint in self.endpoints:
            endpoint.producer.fill(ticket.handoff, tables, computed)

    def load(self, ticket: Ticket, tables: Tables, start: int, stop: int) -> None:
        order = Order("request", ticket, tickets.mint(ticket, SECRET), b"prompt", start, stop, tables)
        for endpoint in self.endpoints:
            endpoint.consumer.load(order)

    def ended(self, seconds: float = 20.0) -> list[Outcome]:
        """One outcome per rank, within the deadline."""
        deadline = time.monotonic() + seconds
        found: list[Outcome] = []
        for endpoint in self.endpoints:
            while not (outcomes := endpoint.consumer.collect()):
                assert time.monotonic() < deadline, "a rank's load did not end"
                time.sleep(0.002)
            found += outcomes
        assert len(found) == len(self.endpoints)
        return found

    def settle(self, ticket: Ticket, tables: Tables, seconds: float = 20.0) -> None:
        """Until no rank needs its blocks any more."""
        deadline = time.monotonic() + seconds
        for endpoint in self.endpoints:
            while not endpoint.producer.settled(ticket.handoff):
                assert time.monotonic() < deadline, "a rank's blocks are still needed"
                endpoint.producer.pump()
                time.sleep(0.002)

    def states(self, ticket: Ticket) -> list[str]:
        records = [endpoint._ledger.get(ticket.handoff) for endpoint in self.endpoints]
        return [record.state if record is not None else "" for record in records]

    def quiet(self, seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while any(e._outgoing.used or e._incoming.used or e._ledger.open or e.producer.claims for e in self.endpoints):
            assert time.monotonic() < deadline, "something is still held"
            time.sleep(0.005)


def agree(producer: Contract, consumer: Contract) -> Agreement:
    result = negotiations.negotiate(producer, consumer)
    assert isinstance(result, Agreement), result
    return result


def hand_over(
    producer: Engine, consumer: Engine, tokens: int, ours: Tables, theirs: Tables, *, start: int = 0, stop: int = 0
) -> tuple[Ticket, Agreement]:
    """One whole handoff that ends well on every rank."""
    agreement = agree(producer.contract, consumer.contract)
    ticket = tickets.issue(tickets.new_handoff(), producer.contract, consumer.contract, agreement, 30_000)
    producer.open(ticket, tokens)
    consumer.load(ticket, theirs, start, stop or tokens)
    producer.fill(ticket, ours, tokens // 2)
    producer.fill(ticket, ours, tokens)
    producer.settle(ticket, ours)
    reasons = [outcome.reason for outcome in consumer.ended()]
    assert reasons == [None] * len(reasons)
    producer.quiet()
    consumer.quiet()
    return ticket, agreement
