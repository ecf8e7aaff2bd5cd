"""Two endpoints over loopback sockets, with caches of unlike layout, and no engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from deeplink.kvconnector.cache import Cache
from deeplink.kvconnector.consumer import Order, Outcome
from deeplink.kvconnector.contract import CacheGroup, Contract, Model, Rank
from deeplink.kvconnector.convert import storage_dtype
from deeplink.kvconnector.endpoint import Endpoint, Settings
from deeplink.kvconnector.layout import Layout
from deeplink.kvconnector.ticket import Ticket, mint, new_handoff
from deeplink.kvconnector.transport.tcp import TcpTransport

SECRET = b"a secret for tests only, 32 byte"
LAYERS, HEADS, DIM, BLOCKS = 3, 2, 32, 24

VEC = "block head (k: dim token | v: token dim)"
AMX = "block head (k: token/16 dim/2 token%16 dim%2 | v: dim/16 token/2 dim%16 token%2)"
NHD = "block token head (kv dim)"
HND = "block head token (kv dim)"


def make_cache(layout: str, block_size: int, dtype: str = "float32", *, seed: int = 0) -> Cache:
    bound = Layout.parse(layout).bind(heads=HEADS, head_dim=DIM, block_size=block_size, blocks=BLOCKS)
    rng = np.random.default_rng(seed)
    size = BLOCKS * bound.block_elements
    layers = [rng.integers(0, 1 << 16, size).astype(storage_dtype(dtype)) for _ in range(LAYERS)]
    return Cache(tuple(layers), bound)


def make_contract(
    epoch: str, role: str, group: CacheGroup, *, weights: str = "w", channel: str = "", tcp: str = ""
) -> Contract:
    model = Model("LlamaForCausalLM", LAYERS, 100, "{}", "none", weights)
    rank = Rank(0, 0, 0, (0, HEADS), channel, {"tcp": tcp})
    return Contract("test", "0", "cpu", role, epoch, model, (group,), (rank,))


def make_group(layout: str, block_size: int, dtype: str = "float32") -> CacheGroup:
    return CacheGroup("full", tuple(range(LAYERS)), HEADS, DIM, dtype, block_size, layout)


@dataclass
class Side:
    epoch: str
    cache: Cache
    endpoint: Endpoint


@dataclass
class Pair:
    """A prefill side and a decode side."""

    producer: Side
    consumer: Side
    endpoints: list[Endpoint] = field(default_factory=list)

    def ticket(self, seconds: float = 10.0, **changes: object) -> tuple[Ticket, str]:
        values = {
            "handoff": new_handoff(),
            "producer": self.producer.epoch,
            "consumer": self.consumer.epoch,
            "channel": self.producer.endpoint.contract.ranks[0].channel,
            "milliseconds": max(1, int(seconds * 1000)),
        }
        ticket = Ticket(**{**values, **changes})  # type: ignore[arg-type]
        return ticket, mint(ticket, SECRET)

    def order(self, ticket: Ticket, text: str, table: list[int], stop: int, *, start: int = 0) -> Order:
        return Order("request", ticket, text, b"prompt", start, stop, table)

    def outcome(self, seconds: float = 10.0) -> Outcome:
        """The next load that ends, within the deadline."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if ended := self.consumer.endpoint.consumer.collect():
                (outcome,) = ended
                return outcome
            time.sleep(0.002)
        raise AssertionError("the load did not end")

    def quiet(self, seconds: float = 2.0) -> None:
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
    secret: bytes = SECRET,
) -> Side:
    epoch = f"{role}-{new_handoff()}"
    cache = make_cache(layout, block_size, dtype, seed=seed)
    group = make_group(layout, block_size, dtype)

    def state(channel: str, transports: dict[str, str]) -> Contract:
        return make_contract(epoch, role, group, weights=weights, channel=channel, tcp=transports["tcp"])

    settings = Settings("127.0.0.1", staging, chunk, verify)
    return Side(epoch, cache, Endpoint(cache, settings, secret, epoch, TcpTransport("127.0.0.1", secret), state))
