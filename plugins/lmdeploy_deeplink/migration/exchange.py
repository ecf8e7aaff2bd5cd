"""One engine's side of its migrations: what prefill offers, what decode loads, and for how long.

| method | called by | on |
|---|---|---|
| describe, connect | LMDeploy's router, through the engine | both |
| offer, settled | the engine's loop, after a prompt has been computed | prefill |
| drop | a router that gives a request up | prefill |
| load | the engine's loop, for a request whose cache comes from elsewhere | decode |
| leave | before a request's blocks are freed | decode |

All of it runs on the thread of the engine's loop. LMDeploy's router mints no tickets, so the two engines make theirs
from the secret they share, and `kv.foreign_seconds` is the time a handoff has, from the prompt's last token on.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import itertools
import logging
import secrets
from collections.abc import Sequence
from typing import Any

from deeplink import config as configuration
from deeplink import secret as shared
from deeplink.errors import ConfigError, DeadlineExceeded, DeeplinkError, HandoffError, ProtocolError, Refused
from deeplink.kvconnector import compiled
from deeplink.kvconnector import contract as co
from deeplink.kvconnector import ticket as tickets
from deeplink.kvconnector.cast import parse_consent
from deeplink.kvconnector.endpoint import Endpoint, Settings
from deeplink.kvconnector.negotiate import Agreement, Refusal, negotiate
from deeplink.kvconnector.order import Order
from deeplink.kvconnector.prompt import prompt_digest
from deeplink.kvconnector.ticket import Ticket
from deeplink.kvconnector.tls import Tls
from deeplink.kvconnector.transport.start import start
from deeplink.plugins import load_plugins
from lmdeploy_deeplink.migration import adapter

LOOK = 0.005
"""Seconds between two looks at what has ended."""
GRACE = 5.0
"""Seconds beyond a handoff's time after which a load that has not been heard of counts as failed."""
NUMBERS = 1 << 47
"""The numbers that name handoffs begin here, so that none is a block's or a session's; there are as many of them, and
all come back from JSON as they were sent."""

log = logging.getLogger("lmdeploy.deeplink")


class Exchange:
    """Reads the cache, proves its layout and listens from the moment it is made. Raises what keeps it from that."""

    def __init__(self, engine: Any, folder: str) -> None:
        settings = configuration.load(None).kv
        if settings.foreign_seconds == 0:
            raise ConfigError(
                "LMDeploy's router pairs engines without deeplink's tickets, which is refused unless it is asked for",
                field="kv.foreign_seconds",
                ours="0",
                theirs="more than 0",
                remedy="set kv.foreign_seconds in deeplink.toml to how long a handoff may take",
            )
        adapter.check_supported(engine)
        plugins = load_plugins()
        # Not within the time of the first handoff.
        log.info("deeplink re-layout is ready after %.1f s of compiling", compiled.warm())
        group = adapter.read_group(engine, plugins.layouts)
        model = adapter.read_model(engine, folder)
        casts = tuple(str(parse_consent(text)) for text in settings.casts)
        tls = Tls.of(settings.tls)
        self._milliseconds = int(settings.foreign_seconds * 1000)
        self._secret = shared.load()
        self._epoch = secrets.token_hex(12)
        self._endpoint = Endpoint(
            (group,),
            Settings.of(settings, tls),
            self._secret,
            self._epoch,
            start(
                plugins.transports.items,
                settings.host,
                self._secret,
                settings.trust,
                settings.digest == "always",
                {"tcp": {"tls": tls, "streams": settings.streams}},
            ),
            lambda channel, transports: adapter.make_contract(
                engine, group, model, self._epoch, channel, transports, casts
            ),
        )
        self._peers: dict[str, co.Contract] = {}
        # Session -> its order, while it is loading; and who waits for an order, by its own name. Neither goes by
        # the handoff: a request that is sent twice asks for one that is loading into another's blocks.
        self._loading: dict[int, Order] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._orders = itertools.count()
        self._collecting: asyncio.Task[None] | None = None
        log.info("deeplink migrates as %s, epoch %s", self._endpoint.contract.role, self._epoch)

    @property
    def seconds(self) -> float:
        """The time that a handoff has."""
        return self._milliseconds / 1000

    def close(self) -> None:
        self._endpoint.close()

    # -- LMDeploy's router -----------------------------------------------------------------------------------

    def describe(self) -> str:
        """This engine's contract, as LMDeploy's router carries it to the other engine."""
        return base64.b64encode(co.encode(self._endpoint.contract)).decode()

    def connect(self, peer: str, text: str) -> None:
        """Remember what `peer` states. Raises Refused, naming the field, when the two cannot hand over."""
        try:
            contract = co.decode(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError) as exc:
            raise ProtocolError(f"{peer} describes itself in no contract: {exc}") from exc
        ours = self._endpoint.contract
        producer, consumer = (ours, contract) if ours.produces else (contract, ours)
        self._agree(producer, consumer)
        self._peers[peer] = contract

    def forget(self, peer: str) -> None:
        """What it had described is not believed any more; loads that have begun go on."""
        self._peers.pop(peer, None)

    def _agree(self, producer: co.Contract, consumer: co.Contract) -> Agreement:
        result = negotiate(producer, consumer)
        if isinstance(result, Refusal):
            raise result.error("the prefill engine", "the decode engine")
        return result

    # -- prefill ---------------------------------------------------------------------------------------------

    def offer(self, tokens: Sequence[int], extra: Sequence[str], table: Sequence[int]) -> int:
        """Stage the cache of a prompt that is computed; gives the number that the decode engine finds it by."""
        number = NUMBERS + secrets.randbelow(NUMBERS)
        contract = self._endpoint.contract
        ticket = Ticket(_name(self._epoch, number), self._epoch, "", (contract.ranks[0].channel,), self._milliseconds)
        producer = self._endpoint.producer
        producer.open(ticket, prompt_digest(tokens, extra), len(tokens))
        producer.fill(ticket.handoff, [table], len(tokens))
        return number

    def settled(self, number: int) -> bool:
        """Whether the blocks of an offer are no longer needed. To be asked until it is so: staging may be full."""
        producer = self._endpoint.producer
        producer.pump()
        return producer.settled(_name(self._epoch, number))

    def drop(self, number: int) -> None:
        """Nobody will come for this offer any more."""
        self._endpoint.producer.abort(_name(self._epoch, number))

    # -- decode ----------------------------------------------------------------------------------------------

    async def load(
        self,
        session: int,
        peer: str,
        numbers: Sequence[int],
        tokens: Sequence[int],
        extra: Sequence[str],
        table: Sequence[int],
    ) -> None:
        """Load the cache of all `tokens` into the blocks of `table`. Raises what kept it from that, within its time.

        The blocks are the engine's again when this has returned or raised, and when `leave` has returned.
        """
        contract = self._peers.get(peer)
        if contract is None:
            raise HandoffError(f"{peer} has not been connected to this engine", remedy="ask LMDeploy's router to do so")
        if len(numbers) != 1:
            raise Refused(
                f"{peer} answered with {len(numbers)} numbers, where deeplink's engines answer with one",
                field="cache_block_ids",
                ours="1",
                theirs=str(len(numbers)),
                remedy="start both engines with --migration-backend deeplink",
            )
        ours = self._endpoint.contract
        name = _name(contract.epoch, numbers[0])
        ticket = tickets.issue(name, contract, ours, self._agree(contract, ours), self._milliseconds)
        text = tickets.mint(ticket, self._secret)
        request = f"{session}.{next(self._orders)}"
        order = Order(request, ticket, text, prompt_digest(tokens, extra), 0, len(tokens), [table])
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[request] = ended
        self._loading[session] = order
        self._endpoint.consumer.load(order)
        if self._collecting is None or self._collecting.done():
            self._collecting = asyncio.create_task(self._collect())
        try:
            await asyncio.wait_for(ended, self.seconds + GRACE)
        except asyncio.TimeoutError:
            self._endpoint.consumer.cancel(name, request)
            raise DeadlineExceeded("the load was not heard of within its time") from None
        finally:
            del self._waiting[request]
            # When the session has ended, its number may be that of another that is loading now.
            if self._loading.get(session) is order:
                del self._loading[session]

    def leave(self, session: int) -> None:
        """The session's blocks are about to be freed: when this returns, nothing is written to them any more."""
        order = self._loading.pop(session, None)
        if order is not None:
            self._endpoint.consumer.cancel(order.ticket.handoff, order.request)

    async def _collect(self) -> None:
        while self._waiting:
            for outcome in self._endpoint.consumer.collect():
                ended = self._waiting.get(outcome.order.request)
                if ended is None or ended.done():
                    continue
                if outcome.reason is None:
                    ended.set_result(None)
                else:
                    ended.set_exception(DeeplinkError.from_reason(outcome.reason))
            await asyncio.sleep(LOOK)


def _name(epoch: str, number: int) -> str:
    return f"lmdeploy-{epoch}-{number:x}"
