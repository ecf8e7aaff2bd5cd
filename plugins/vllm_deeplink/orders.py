"""What the scheduler half tells the worker half, once per engine step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from deeplink.errors import Reason
from deeplink.kvconnector.first_token import FirstToken
from deeplink.kvconnector.order import Order
from deeplink.kvconnector.ticket import Ticket


@dataclass(frozen=True, slots=True)
class Open:
    """A prefill of `tokens` tokens begins whose KV is to be handed over."""

    request: str
    ticket: Ticket
    prompt: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class Fill:
    """After this step's forward pass, the first `computed` tokens are in the blocks of `tables` (one per group)."""

    request: str
    handoff: str
    tables: tuple[tuple[int, ...], ...]
    computed: int


@dataclass(frozen=True, slots=True)
class Deny:
    """A request that cannot be loaded; the worker reports it failed, and keeps the reason for who asks."""

    request: str
    handoff: str | None
    reason: Reason


@dataclass(slots=True)
class Orders(KVConnectorMetadata):
    """Handoffs whose blocks are lost (preemption), prefills, loads, first tokens, and what ended early.

    The blocks of a load stay its request's until the worker reports the request received.
    """

    lost: list[str] = field(default_factory=list)
    opens: list[Open] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    loads: list[Order] = field(default_factory=list)
    firsts: list[tuple[str, FirstToken]] = field(default_factory=list)
    denies: list[Deny] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    cancels: list[Order] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RankContract(KVConnectorHandshakeMetadata):
    """One worker's contract, encoded, on its way to the engine core."""

    contract: bytes
