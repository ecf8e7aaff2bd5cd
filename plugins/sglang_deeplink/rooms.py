"""Requests that another router than deeplink's has paired, as SGLang's own does: by a host, a port and a room.

There is no ticket then, so each engine makes its own out of the room's number: the prefill engine one to fill, and the
decode engine, once it has met the prefill engine at its bootstrap port, one to claim. Both have the secret, so neither
believes anything that another engine has not said; but whoever can send requests to the engines can pair them, and make
a decode engine call at any address. It is off unless ``kv.foreign_seconds`` says how long such a handoff may take.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass, field

from deeplink.errors import ConfigError, DeeplinkError, HandoffError, Refused
from deeplink.kvconnector.endpoint import Endpoint
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.handoffs.ticket import Ticket

MEET_SECONDS = 10.0


def name(room: int) -> str:
    """The handoff of a room. A room is good for one request, like a ticket."""
    return f"room-{room}"


def to_fill(room: int, endpoint: Endpoint, seconds: float) -> Ticket:
    """What a prefill engine opens a handoff with: its own ticket, for whoever comes to that room."""
    contract = endpoint.contract
    return Ticket(name(room), contract.epoch, "", (contract.ranks[0].channel,), _milliseconds(seconds))


@dataclass(slots=True, eq=False)
class Meeting:
    """A decode engine's call at a prefill engine; `ticket` with its text, or `failure`, is there when it is over."""

    endpoint: Endpoint
    secret: bytes
    address: str
    room: int
    until: float
    ticket: Ticket | None = None
    text: str = ""
    failure: DeeplinkError | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Does not wait: the call is made in a thread, which ends by itself."""
        try:
            threading.Thread(target=self._run, name=f"deeplink-meeting-{self.room}", daemon=True).start()
        except RuntimeError as exc:  # the process may have no more threads
            self.failure = HandoffError(f"the prefill engine could not be called: {exc}")
            self._over.set()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def _run(self) -> None:
        # Whatever happens in this thread, the request hears of the end.
        self.failure = HandoffError("the call at the prefill engine ended unexpectedly; see the engine's log")
        try:
            self._meet()
            self.failure = None
        except DeeplinkError as exc:
            self.failure = exc
        finally:
            self._over.set()

    def _meet(self) -> None:
        peer, agreement = self.endpoint.meet(self.address, min(self.until, time.monotonic() + MEET_SECONDS))
        own = self.endpoint.contract.epoch
        channels = (peer.ranks[0].channel,)
        left = _milliseconds(self.until - time.monotonic())
        if agreement.wire != tuple(group.dtype for group in peer.groups):
            raise Refused(
                "the cache would have to be cast by the prefill engine, which nobody tells it without a ticket",
                field="wire",
                ours=", ".join(agreement.wire),
                theirs=", ".join(group.dtype for group in peer.groups),
                remedy="send requests through deeplink's router",
            )
        self.ticket = Ticket(name(self.room), peer.epoch, own, channels, left, wire=agreement.wire)
        self.text = tickets.mint(self.ticket, self.secret)


def listen(host: str, port: int) -> socket.socket:
    """Where a prefill engine is met. Raises ConfigError when the address cannot be had."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as exc:
        raise ConfigError(
            f"decode engines cannot be met at {host}:{port}: {exc.strerror}",
            field="disaggregation-bootstrap-port",
            ours=str(port),
            remedy="choose another port with --disaggregation-bootstrap-port",
        ) from exc


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))
