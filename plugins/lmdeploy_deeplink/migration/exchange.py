"""One engine's side of its handoffs: what prefill offers, what decode loads, and for how long.

| method | called by | on |
|---|---|---|
| admit | the engine, for a request with a ticket of deeplink's router | both |
| offer, settled, drop | the engine's loop, after a prompt has been computed | prefill |
| load | the engine's loop, for a request whose cache comes from elsewhere | decode |
| leave | before a request's blocks are freed | decode |

All of it runs on the thread of the engine's loop. Where the cache is, in this process (`part`) or in others (`spread`),
is the same to it. `foreign` makes the tickets of what LMDeploy's own router pairs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from deeplink import config as configuration
from deeplink import secret as shared
from deeplink.errors import Aborted, DeadlineExceeded, DeeplinkError, TicketRefused
from deeplink.kvconnector.contracts import contract as co
from deeplink.kvconnector.contracts.prompt import prompt_digest
from deeplink.kvconnector.control import Blocks, Control
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.handoffs.first_token import FirstToken
from deeplink.kvconnector.handoffs.order import Order
from deeplink.kvconnector.handoffs.ticket import Ticket
from deeplink.kvconnector.wires.tls import Tls
from lmdeploy_deeplink.migration import adapter
from lmdeploy_deeplink.migration.adapter import Place, Stated
from lmdeploy_deeplink.migration.foreign import Foreign
from lmdeploy_deeplink.migration.part import Part
from lmdeploy_deeplink.migration.passage import PORT, PRODUCE
from lmdeploy_deeplink.migration.spread import Spread

GRACE = 5.0
"""Seconds beyond a handoff's time after which a load that has not been heard of counts as failed."""

log = logging.getLogger("lmdeploy.deeplink")


class Exchange:
    """Reads the cache, proves its layout and listens from the moment it is made. Raises what keeps it from that.

    `spread` does so in the engine's other processes, of what they state and the epoch, where those have the cache.
    """

    def __init__(self, engine: Any, folder: str, spread: Callable[[Stated, str], Spread] | None = None) -> None:
        loaded = configuration.load(None)
        settings = loaded.kv
        adapter.check_supported(engine)
        self._secret = shared.load(loaded.secret_file)
        self._epoch = epoch = secrets.token_hex(12)
        self._control: Control | None = None
        stated = adapter.stated(engine, adapter.read_model(engine, folder))
        self._part: Part | Spread
        if spread is not None:
            self._part = spread(stated, epoch)
        else:
            self._part = Part(
                settings,
                self._secret,
                epoch,
                lambda known: adapter.read_group(engine, known),
                lambda group, channel, transports, casts: stated.contract(
                    group, Place(), epoch, channel, transports, casts
                ),
                ended=self._silence,
            )
        contract = self._part.contract
        self.foreign = Foreign(contract, settings.foreign_seconds)
        # Session -> its order, while it is loading. Not by the handoff: a request that is sent twice asks for one that
        # is loading into another's blocks.
        self._loading: dict[int, Order] = {}
        self._orders = itertools.count()
        tls = Tls.of(settings.tls)
        self._control = _control(contract, self._secret, lambda: adapter.blocks(engine), tls, settings.host)
        log.info("deeplink hands over as %s, epoch %s", contract.role, self._epoch)

    def close(self) -> None:
        self._part.close()
        self._silence()

    def end(self, why: str) -> None:
        """What the contract states is about to be wrong."""
        log.error("%s", why)
        self.close()

    def _silence(self) -> None:
        if self._control is not None:
            self._control.close()

    def admit(self, side: str, text: str) -> Ticket:
        """The ticket of a request, which has to be for this engine. Raises TicketRefused."""
        ticket = tickets.verify(text, self._secret)
        contract = self._part.contract
        if (side == PRODUCE) != contract.produces:
            raise TicketRefused(
                f"the ticket is to {side}, and this is a {contract.role} engine",
                field="side",
                ours=contract.role,
                theirs=side,
            )
        meant = ticket.producer if contract.produces else ticket.consumer
        if meant != self._epoch:
            raise tickets.other_epoch(self._epoch, meant)
        return ticket

    # -- prefill ---------------------------------------------------------------------------------------------

    def offer(
        self, ticket: Ticket, tokens: Sequence[int], extra: Sequence[str], table: Sequence[int], first: FirstToken
    ) -> None:
        """Stage the cache of a prompt that is computed. `first` is the token that was sampled after it. Raises what
        keeps it from that, where that is known by then; whoever comes for it is told why."""
        self._part.offer(ticket, prompt_digest(tokens, extra), len(tokens), table, first)

    def withhold(self, ticket: Ticket, why: DeeplinkError) -> None:
        """There will be no such offer; whoever comes for it is told why."""
        self._part.withhold(ticket.handoff, why.reason())

    def settled(self, name: str) -> bool:
        """Whether the blocks of an offer are no longer needed. To be asked until it is so: staging may be full."""
        return self._part.settled(name)

    def drop(self, name: str) -> None:
        """Nobody will come for this offer any more. When this returns, its blocks are not read."""
        self._part.abort(name)

    # -- decode ----------------------------------------------------------------------------------------------

    async def load(
        self, session: int, ticket: Ticket, tokens: Sequence[int], extra: Sequence[str], table: Sequence[int]
    ) -> FirstToken:
        """Load the cache of all `tokens` into the blocks of `table`, and give the token that prefill has sampled after
        them. Raises what kept it from that, within the ticket's time.

        The blocks are the engine's again when this has returned or raised, and when `leave` has returned.
        """
        request = f"{session}.{next(self._orders)}"
        text = tickets.mint(ticket, self._secret)
        prompt = prompt_digest(tokens, extra)
        order = Order(request, ticket, text, prompt, 0, len(tokens), [table], first=True)
        self._loading[session] = order
        try:
            # It goes on to its own end where this has waited long enough.
            outcome = await asyncio.wait_for(asyncio.shield(self._part.load(order)), ticket.milliseconds / 1000 + GRACE)
        except asyncio.TimeoutError:
            self._part.cancel(ticket.handoff, request)
            raise DeadlineExceeded("the load was not heard of within its time") from None
        finally:
            # When the session has ended, its number may be that of another that is loading now.
            if self._loading.get(session) is order:
                del self._loading[session]
        if outcome.reason is not None:
            raise DeeplinkError.from_reason(outcome.reason)
        assert outcome.first is not None
        return outcome.first

    def refuse(self, ticket: Ticket, why: DeeplinkError) -> None:
        """It will not be loaded; whoever asks the control endpoint is told why."""
        self._part.refuse(ticket.handoff, why.reason())

    def abandon(self, ticket: Ticket) -> None:
        """The request with this ticket has left before anything came of it."""
        if self._part.contract.produces:
            self.withhold(ticket, Aborted("the prefill request was given up"))
        else:
            self.refuse(ticket, Aborted("the decode request was given up"))

    def leave(self, session: int) -> None:
        """The session's blocks are about to be freed: when this returns, nothing is written to them any more."""
        order = self._loading.pop(session, None)
        if order is not None:
            self._part.cancel(order.ticket.handoff, order.request)


def _control(
    contract: co.Contract, secret: bytes, blocks: Callable[[], Blocks], tls: Tls | None, host: str
) -> Control | None:
    """None where no port was said: an engine without a server, in a program of its own."""
    text = os.environ.get(PORT, "")
    if not text:
        return None
    port = configuration.parse_port(text, PORT)
    control = Control(contract, secret, blocks, tls)
    log.info("deeplink control endpoint on %s:%d", host, control.start(host, port))
    return control
