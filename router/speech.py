"""What a worker and the process that owns the router's state say to each other, over a Unix socket: msgpack, each
message after its length. Both are of one version and one user, and nobody else can open the socket.

A request is known to the owner by its grant: a number that the worker counts up, new for each choice. What a grant was
given are its seats, counted from 0: who prefills and who decodes, or the one that does both, then every decode engine
that takes another's place. What is said is heard in that order, and also when the one that said it has been killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from deeplink.errors import Reason
from deeplink.router.admission import Need
from deeplink.router.engine import Engine

MAX_MESSAGE = 64 << 20
_LENGTH = 4


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """`Need`, of which the session may be no text."""

    handoff: bool
    tokens: int
    output: int
    session: bytes
    chain: tuple[int, ...]
    chains: dict[int, tuple[int, ...]] | None
    barred: dict[str, str]
    generates: bool

    @staticmethod
    def of(need: Need) -> Wanted:
        return Wanted(
            need.handoff,
            need.tokens,
            need.output,
            need.session.encode("utf-8", "surrogatepass"),
            need.chain,
            need.chains,
            dict(need.barred),
            need.generates,
        )

    def need(self) -> Need:
        return Need(
            self.handoff,
            self.tokens,
            self.output,
            self.session.decode("utf-8", "surrogatepass"),
            self.chain,
            self.chains,
            self.barred,
            self.generates,
        )


class Choose(msgspec.Struct, frozen=True, array_like=True, tag=1):
    grant: int
    wanted: Wanted
    avoid: list[str]


class Reread(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Another decode engine for what the grant's prefill engine has staged."""

    grant: int
    avoid: list[str]


class Handing(msgspec.Struct, frozen=True, array_like=True, tag=3):
    grant: int
    handoff: str


class Prefilled(msgspec.Struct, frozen=True, array_like=True, tag=4):
    grant: int
    seat: int


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=5):
    grant: int
    seat: int
    well: bool


class Settled(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Nothing more comes of this grant, and what it still holds is free."""

    grant: int


class Judged(msgspec.Struct, frozen=True, array_like=True, tag=7):
    engine: str
    well: bool


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=8):
    handoff: str
    engines: list[str]


class Look(msgspec.Struct, frozen=True, array_like=True, tag=9):
    call: int
    engines: list[str] | None


class Link(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Two engines are to hand over, by their names."""

    call: int
    prefill: str
    decode: str


class Guessed(msgspec.Struct, frozen=True, array_like=True, tag=10):
    pass


class FirstByte(msgspec.Struct, frozen=True, array_like=True, tag=11):
    kind: str
    seconds: float
    tried: int = 0
    ends: tuple[tuple[str, str, bool], ...] = ()


class Over(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """A request has ended, as `Metrics.ended` and `Recent.ended` are told."""

    kind: str
    tried: int
    ends: tuple[tuple[str, str, bool], ...]
    status: str
    code: str
    first: float
    whole: float


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=13):
    status: str
    code: str


class State(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """All engines; when each was last heard of, by the clock that the processes of one host share; which bear an early
    claim; and by which block sizes prompts are looked up."""

    engines: list[Engine]
    answered: dict[str, float]
    early: list[str]
    sizes: list[int]


class Chosen(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """`prefill` is empty if one engine does all of it; both are if a `Reread` found nobody."""

    grant: int
    prefill: str
    decode: str


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=22):
    grant: int
    reason: Reason


class Done(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """What was asked by this number is done; `reason` says why it was not."""

    call: int
    reason: Reason | None = None


Asked = (
    Choose
    | Reread
    | Handing
    | Prefilled
    | Ended
    | Settled
    | Judged
    | Cancel
    | Look
    | Link
    | Guessed
    | FirstByte
    | Over
    | Refused
)
Told = State | Chosen | Failed | Done


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):  # a read-only one
        return dict(value)
    raise TypeError(f"a message has a {type(value).__name__}, which is not said on this line")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_asked: msgspec.msgpack.Decoder[Asked] = msgspec.msgpack.Decoder(Asked)
_told: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told)


class Line(asyncio.Protocol):
    """One end. `hear` gets each message of the other, `over` is called once when it has gone. What cannot be read ends
    the connection. Messages go out together, at the latest when the loop has done what it is about."""

    def __init__(self, owner: bool, hear: Callable[[Any], None], over: Callable[[], None]) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = _asked if owner else _told
        self._hear = hear
        self._end = over
        self._data = bytearray()
        self._waiting: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None

    def send(self, message: Asked | Told) -> None:
        """Lost if the other end has gone."""
        data = _encoder.encode(message)
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting += (len(data).to_bytes(_LENGTH, "big"), data)

    def flush(self) -> None:
        """What was sent is on its way when this returns, whatever becomes of this process."""
        waiting, self._waiting = self._waiting, []
        if waiting and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(waiting))

    def close(self) -> None:
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        buffer = self._data
        buffer += data
        at = 0
        while len(buffer) - at >= _LENGTH:
            size = int.from_bytes(buffer[at : at + _LENGTH], "big")
            if size > MAX_MESSAGE:
                self.close()
                return
            end = at + _LENGTH + size
            if len(buffer) < end:
                break
            try:
                message = self._decoder.decode(buffer[at + _LENGTH : end])
            except msgspec.DecodeError:
                self.close()
                return
            at = end
            self._hear(message)
        if at:
            del buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
