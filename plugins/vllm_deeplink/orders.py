"""What the scheduler half tells the worker half once per engine step, and what it hears back."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from deeplink.errors import Reason
from deeplink.kvconnector.handoffs.first_token import FirstToken
from deeplink.kvconnector.handoffs.order import Order
from deeplink.kvconnector.handoffs.ticket import Ticket


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
    """A request that cannot be loaded; the worker reports it failed, and keeps the reason for who asks.

    As with a load, the tokens from `start` on should have come into the blocks of `tables`.
    """

    request: str
    handoff: str | None
    reason: Reason
    start: int
    tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Withhold:
    """A handoff that is not offered; the reason is for who comes to claim it."""

    handoff: str
    reason: Reason


@dataclass(slots=True)
class Orders(KVConnectorMetadata):
    """Handoffs whose blocks are lost (preemption) or that are not offered, prefills, loads, first tokens, and what has
    ended early.

    The blocks of a load stay its request's until the worker reports the request received. `saved`: the worker has done
    what comes after the forward pass, which some versions of vLLM ask for twice.
    """

    lost: list[str] = field(default_factory=list)
    withheld: list[Withhold] = field(default_factory=list)
    opens: list[Open] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    loads: list[Order] = field(default_factory=list)
    firsts: list[tuple[str, FirstToken]] = field(default_factory=list)
    denies: list[Deny] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    cancels: list[Order] = field(default_factory=list)
    saved: bool = False


@dataclass(frozen=True, slots=True)
class Settled:
    """Requests by what has ended since the last step: sent, received, and those of the received whose load failed.

    Beside a failed one is the first block, in the first cache group, that should have been loaded into.
    """

    sent: set[str]
    received: set[str]
    failed: dict[str, int]


@dataclass(frozen=True, slots=True)
class RankContract(KVConnectorHandshakeMetadata):
    """One worker's contract, encoded, on its way to the engine core."""

    contract: bytes
