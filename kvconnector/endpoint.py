"""One engine process's side of kvconnector: what an engine plugin holds.

It owns the staging memory, the ledger, the transports and the channel's listener, and wires the producer and the
consumer to them. The plugin calls `producer` and `consumer`; peers and the control endpoint come in by the channel.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.errors import ConfigError, DeeplinkError, ProtocolError, Reason
from deeplink.kvconnector.caches.group import Group
from deeplink.kvconnector.contracts import contract as co
from deeplink.kvconnector.contracts.negotiate import Agreement, Refusal, negotiate
from deeplink.kvconnector.handoffs import channel as ch
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.handoffs.consumer import Consumer
from deeplink.kvconnector.handoffs.handoff import Ledger, Record, Side
from deeplink.kvconnector.handoffs.producer import Producer
from deeplink.kvconnector.handoffs.tally import Half, Tally
from deeplink.kvconnector.relayout.digest import SAMPLED
from deeplink.kvconnector.relayout.plan import TILE
from deeplink.kvconnector.transport.arena import Arena
from deeplink.kvconnector.transport.base import LendingTransport
from deeplink.kvconnector.transport.staging import Staging
from deeplink.kvconnector.transport.start import Transports
from deeplink.kvconnector.wires.listener import Listener
from deeplink.kvconnector.wires.tls import Tls

if TYPE_CHECKING:
    from deeplink.config import KVSection

FIRST_SECONDS = 10.0
IDLE_SECONDS = 24 * 3600.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """`staging` is per direction, in bytes; `verify` says whether the consumer checks the digests, and `every` of how
    many tiles one; with `tls` the channel uses it, and peers must."""

    host: str
    staging: int
    chunk: int
    verify: bool
    tls: Tls | None = None
    every: int = 1

    @staticmethod
    def of(section: KVSection, tls: Tls | None = None) -> Settings:
        """What deeplink.toml says under [kv]; `tls` is loaded from its files."""
        every = SAMPLED if section.digest == "sampled" else 1
        return Settings(section.host, section.staging, section.chunk, section.digest != "off", tls, every)


class Endpoint:
    """Starts listening when it is made. The caches of the groups are in host memory or on any device
    (`deeplink.kvconnector.caches.device_cache`); what is staged and received is always in host memory. `state` builds
    this rank's contract once the addresses are known; `rank` is its place among the ranks of its engine, as a ticket
    counts them."""

    def __init__(
        self,
        groups: Sequence[Group],
        settings: Settings,
        secret: bytes,
        epoch: str,
        transports: Transports,
        state: Callable[[str, dict[str, str]], co.Contract],
        rank: int = 0,
    ) -> None:
        tile = TILE * max(group.wire().token_bytes for group in groups)
        if settings.staging < tile:
            raise ConfigError(
                f"the staging memory is smaller than {TILE} tokens of this model's KV cache",
                field="kv.staging",
                ours=str(settings.staging),
                theirs=f"at least {tile}",
                remedy="raise kv.staging in deeplink.toml",
            )
        self._secret = secret
        self._tls = settings.tls
        lending = [one for one in transports.running.values() if isinstance(one, LendingTransport)]
        self._outgoing = Staging(settings.staging, _arena(settings.staging) if lending else None)
        self._incoming = Staging(settings.staging)
        for transport in lending:
            transport.lend(self._outgoing)
        self.transports = transports = transports.stage([self._outgoing.memory, self._incoming.memory])
        self._ledger = Ledger()
        self.producer = Producer(
            groups,
            self._outgoing,
            self._ledger,
            transports.running,
            epoch,
            min(settings.chunk, settings.staging),
            rank,
        )
        self.consumer = Consumer(
            groups,
            self._incoming,
            self._ledger,
            transports.running,
            self._dial,
            verify=settings.verify,
            every=settings.every,
            rank=rank,
        )
        # The contract names the listener's address, so peers can come before it is there; they wait.
        self._ready = threading.Event()
        self._listener = Listener(settings.host, secret, ch.PURPOSE, self._serve, settings.tls)
        self._others: list[Listener] = []
        self.contract = state(self._listener.address, transports.addresses)
        self._encoded = co.encode(self.contract)
        self._ready.set()

    def close(self) -> None:
        self.producer.close()
        self.consumer.close()
        for listener in (self._listener, *self._others):
            listener.close()
        self.transports.close()

    def tallies(self) -> tuple[Tally, ...]:
        """What has ended at this rank since it was started."""
        return self._ledger.tallies()

    def refuse(self, handoff: str, reason: Reason) -> None:
        """Keep the reason for a handoff this engine will not load, for whoever asks the control endpoint."""
        if self._ledger.begin(handoff, "consumer", "receiving"):
            self._ledger.end(handoff, "failed", reason)

    def withhold(self, handoff: str, reason: Reason) -> None:
        """Keep the reason for a handoff this engine will not offer, for whoever claims it."""
        if self._ledger.begin(handoff, "producer", "filling"):
            self._ledger.end(handoff, "failed", reason)

    def listen(self, sock: socket.socket) -> None:
        """Serve the channel on this listening socket, too, which is the endpoint's from now on."""
        self._others.append(Listener(sock, self._secret, ch.PURPOSE, self._serve, self._tls))

    def meet(self, address: str, deadline: float) -> tuple[co.Contract, Agreement]:
        """The contract of the producer whose channel is at `address`, and what is agreed with it. Raises Refused where
        nothing is; waits until the deadline at most."""
        channel = self._dial(address, deadline)
        channel.close()
        return channel.peer, channel.agreement

    def record(self, handoff: str) -> Record | None:
        """Where a handoff is on this side, or how it ended; None if it was never heard of, or long ago."""
        return self._ledger.get(handoff)

    def _dial(self, address: str, deadline: float) -> ch.Channel:
        """As consumer: connect, exchange contracts, and go on only with an agreement."""
        channel = ch.Channel.connect(address, self._secret, deadline, self._tls)
        try:
            channel.send(ch.Hello(self._encoded), deadline)
            answer = channel.receive(deadline)
            if isinstance(answer, ch.Fail):
                raise DeeplinkError.from_reason(answer.reason)
            if not isinstance(answer, ch.Hello):
                raise ProtocolError(f"{type(answer).__name__} instead of a contract")
            channel.peer = co.decode(answer.contract)
            channel.agreement = _agree(channel.peer, self.contract)
        except DeeplinkError:
            channel.close()
            raise
        return channel

    def _serve(self, sock: socket.socket) -> None:
        self._ready.wait(FIRST_SECONDS)
        channel = ch.Channel(sock)
        first = channel.receive(time.monotonic() + FIRST_SECONDS)
        if isinstance(first, (ch.Ask, ch.Cancel)):
            channel.send(self._answer(first), time.monotonic() + FIRST_SECONDS)
            return
        if isinstance(first, ch.Watch):
            self._tell(channel, first)
            return
        try:
            if not isinstance(first, ch.Hello):
                raise ProtocolError(f"{type(first).__name__} before a contract")
            channel.peer = co.decode(first.contract)
            channel.agreement = _agree(self.contract, channel.peer)
            channel.send(ch.Hello(self._encoded), time.monotonic() + FIRST_SECONDS)
            while True:
                message = channel.receive(time.monotonic() + IDLE_SECONDS)
                if isinstance(message, ch.Quit):
                    return
                if not isinstance(message, ch.Claim):
                    raise ProtocolError(f"{type(message).__name__} out of turn")
                ticket = tickets.verify(message.ticket, self._secret)
                self.producer.serve(channel, message, ticket, channel.peer.epoch)
        except DeeplinkError as exc:
            channel.send(ch.Fail(exc.reason()), time.monotonic() + 1.0)
            raise

    def _tell(self, channel: ch.Channel, message: ch.Message) -> None:
        """Answer a watcher for as long as it asks."""
        while isinstance(message, ch.Watch):
            stages = self.producer.stages(message.handoffs, message.known)
            channel.send(ch.Watched(stages), time.monotonic() + FIRST_SECONDS)
            message = channel.receive(time.monotonic() + FIRST_SECONDS)
        raise ProtocolError(f"{type(message).__name__} out of turn")

    def _answer(self, question: ch.Ask | ch.Cancel) -> ch.Answer:
        if isinstance(question, ch.Cancel):
            self.producer.abort(question.handoff)
            self.consumer.cancel(question.handoff)
        return ch.Answer(
            record=self._ledger.get(question.handoff) if question.handoff else None,
            staging_capacity=self._outgoing.capacity + self._incoming.capacity,
            staging_used=self._outgoing.used + self._incoming.used,
            claims=self.producer.claims + self.consumer.claims,
            handoffs=self._ledger.open,
            ended=dict(self._ledger.ended_by_state),
            late=self._ledger.late,
            halves={
                "producer": self._half("producer", self.producer.claims, self._outgoing),
                "consumer": self._half("consumer", self.consumer.claims, self._incoming),
            },
            tallies=self._ledger.tallies(),
        )

    def _half(self, side: Side, claims: int, staging: Staging) -> Half:
        return Half(self._ledger.open_of(side), claims, staging.capacity, staging.used)


def _arena(capacity: int) -> Arena | None:
    """Memory that peers on this host can read where it is, where the kernel has such."""
    try:
        return Arena(capacity)
    except (AttributeError, OSError) as exc:
        log.warning("deeplink staging cannot be lent here, and is copied: %s", exc)
        return None


def _agree(producer: co.Contract, consumer: co.Contract) -> Agreement:
    """What the two ranks agree on. A contract on a channel is that of one rank."""
    for contract in (producer, consumer):
        if len(contract.ranks) != 1:
            raise ProtocolError(f"a contract of {len(contract.ranks)} ranks, where that of one is due")
    result = negotiate(producer, consumer, whole=False)
    if isinstance(result, Refusal):
        raise result.error("the prefill engine", "the decode engine")
    return result
