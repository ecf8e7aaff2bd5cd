"""How engines with deeplink's connector hand over: by a ticket, and by asking their control endpoints."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from deeplink.errors import DeeplinkError
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.handoffs.handoff import BEGUN, NOT_BEGUN
from deeplink.router import body as bodies
from deeplink.router import retry
from deeplink.router.choice import Pair
from deeplink.router.engine import Engine
from deeplink.router.exchange import Exchange
from deeplink.router.kinds import Part, Prefilling, Tools

STAGED = ("filling", "staged")
"""States of the prefill side in which the cache can still be fetched."""


@dataclass
class DeeplinkHanding:
    """One handoff. Whoever takes it over fetches under the same id, with a ticket of its own. `early`: the decode
    engine is asked while prefill may not have ended."""

    exchange: Exchange
    pair: Pair
    until: float
    tools: Tools
    secret: bytes
    together: bool | None = None
    confirmed: bool = False
    linger: bool = False
    early: bool = field(init=False)

    def __post_init__(self) -> None:
        self.early = self.together is True
        self._ticket = self._mint(self.pair.decode)
        self._consumer = self.pair.decode

    async def ready(self, consumer: Engine) -> None:
        if consumer != self._consumer:
            self.tools.fleet.cancel(self.exchange.handoff, (self._consumer,))
            self._ticket, self._consumer = self._mint(consumer), consumer

    def prefill(self) -> Part:
        members = {bodies.PARAMS: bodies.params("produce", self._ticket)}
        return Part(bodies.prefill(self.exchange.body, members, chat=self.exchange.chat), [])

    def staged(self, answer: bytes) -> None:
        """Its control endpoint says what there is."""

    def decode(self, consumer: Engine) -> Part:
        members = {bodies.PARAMS: bodies.params("consume", self._ticket, early=self.early)}
        return Part(bodies.decode(self.exchange.body, members), [])

    async def begun(self) -> bool:
        """Waits for something to be there that the decode engine can fetch. False where one of the two engines cannot
        do with that, and on one host: there is no link whose time could be hidden, and the decode engine that waits
        takes the prefill engine's cores."""
        if not self.tools.fleet.early(self.pair.decode.name) or _host(self.pair.prefill) == _host(self.pair.decode):
            return False
        stage = await self.tools.fleet.stage(self.pair.prefill, self.exchange.handoff, NOT_BEGUN, self.until)
        self.early = stage == BEGUN
        return stage is not None

    async def offers(self, error: DeeplinkError) -> bool:
        if retry.other_epoch(error):
            return False
        state = await self.tools.fleet.state(self.pair.prefill, self.exchange.handoff)
        return state is not None and state.state in STAGED

    def over(self, prefilling: Prefilling, finished: bool) -> None:
        running = not prefilling.done()
        if running:
            prefilling.cancel()
        if not finished:
            self.tools.fleet.cancel(self.exchange.handoff, self.exchange.asked)
        elif running:
            self.tools.fleet.cancel(self.exchange.handoff, (self.pair.prefill,))

    def _mint(self, consumer: Engine) -> str:
        # Of the agreement a ticket says what travels and who takes what: the same for all that could read it.
        producer, agreement = self.pair.prefill, self.pair.agreement
        assert producer.contract is not None
        assert consumer.contract is not None
        assert agreement is not None
        milliseconds = min(max(1, math.ceil((self.until - time.monotonic()) * 1000)), 86_400_000)
        ticket = tickets.issue(self.exchange.handoff, producer.contract, consumer.contract, agreement, milliseconds)
        return tickets.mint(ticket, self.secret)


def _host(engine: Engine) -> str:
    """Where its cache is, as its peers reach it."""
    assert engine.contract is not None
    return engine.contract.ranks[0].channel.rpartition(":")[0]
