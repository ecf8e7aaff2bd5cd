"""The seam between kvconnector and whatever moves the bytes.

A transport moves bytes from this process's staging into a peer's. The receiving side registers memory and hands the
key to the peer over the handoff channel; the sending side pushes. Nothing is ever addressed by pointer.

| method     | called by | when                                     | owns                                       |
|------------|-----------|------------------------------------------|--------------------------------------------|
| stage      | endpoint  | once per staging arena, before all else  | the caller keeps the memory until close    |
| register   | consumer  | before it grants a chunk                 | the caller keeps the memory until withdraw |
| connect    | producer  | once per peer, kept and reused           | the caller closes the link                 |
| Link.post  | producer  | instead, where there is more to come     | (optional)                                 |
| Link.push  | producer  | per chunk; returns when the peer has it  | the source stays the caller's              |
| close      | both      | once, at shutdown                        |                                            |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from deeplink.kvconnector.transport.arena import Lent
from deeplink.kvconnector.transport.staging import Staging


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do, as data.

    `memory` names the kinds of memory it reads and writes ("dram", …); `authenticated` says that the serving side
    checks key, bounds and secret itself, so that the network need not be trusted; `revocable` that a peer's push can be
    ended for certain, whatever that peer does. Of several transports that two engines share, those within one host come
    first, then those with the higher `preference`.
    """

    memory: frozenset[str]
    cross_host: bool
    authenticated: bool
    preference: int = 0
    revocable: bool = True


@dataclass(frozen=True, slots=True)
class Push:
    """Bytes of ours, to go `offset` bytes into the peer's region `key`."""

    source: memoryview
    key: bytes
    offset: int


class Region(Protocol):
    """Memory a peer may write into until it is withdrawn."""

    lent: Lent | None
    """Where the bytes are after a push, if the peer has lent them rather than written into the region."""

    @property
    def key(self) -> bytes: ...

    def withdraw(self) -> None:
        """When this returns no peer writes there any more, whatever state its push is in.

        Of a transport that is not `revocable` it raises DeadlineExceeded, after seconds, when a peer may have posted a
        write and does not say that it is over. The memory must then stay out of use; a later call may find it free.
        """


class Link(Protocol):
    """A connection to one peer's transport. Used by one thread at a time."""

    def push(self, pushes: Sequence[Push], deadline: float) -> None:
        """Returns when every byte is in the peer's memory.

        Raises PeerGone, DeadlineExceeded, or Refused when the peer knows no such region or the bytes would leave
        it; bytes within a region may have come by then. After any of these the link is broken and must be closed.
        """

    def close(self) -> None:
        """May come from another thread than the one that pushes, and makes its push fail."""


@runtime_checkable
class LendingTransport(Protocol):
    """A transport whose peers can read staging where it is."""

    def lend(self, staging: Staging) -> None:
        """What is pushed will lie in it, and may be lent. Called once, before anything is pushed."""


@runtime_checkable
class PostingLink(Link, Protocol):
    """A link that can have several pushes under way."""

    def post(self, pushes: Sequence[Push], deadline: float) -> Callable[[float], None]:
        """As `push`, but returns when the sources are not read any more; the result, called with a deadline, does the
        rest. What was posted first has to be waited for first."""


class Transport(Protocol):
    """What the factory makes that a plugin registers: called with the host at which peers reach this one and the secret
    that all engines share, and raising whatever keeps it from working here. Any thread may call any method."""

    name: str
    capabilities: Capabilities

    @property
    def address(self) -> str:
        """Where peers connect to; it goes into the contract.

        If not everyone can reach it, it says so in the form of `deeplink.kvconnector.contracts.contract.local_address`.
        """

    def stage(self, memory: memoryview) -> None:
        """What will be registered and pushed lies within such an arena: for libraries that must know memory first.

        Raises whatever keeps the transport from being used. Memory outside may cost a registration each time.
        """

    def register(self, memory: memoryview) -> Region:
        """From now on a peer that has the region's key may write there, and nowhere else. The key cannot be guessed,
        and is another each time."""

    def connect(self, address: str, deadline: float) -> Link:
        """To the transport that states this `address`. Raises PeerGone where none answers, Refused where it has another
        secret, or DeadlineExceeded (monotonic seconds)."""

    def close(self) -> None:
        """Ends all links, ours to others and theirs to us, and accepts no more. What is pushed over them fails."""
