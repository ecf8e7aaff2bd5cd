"""One push of random bytes over one transport, judged by a digest and timed."""

from __future__ import annotations

import ipaddress
import mmap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from xxhash import xxh3_64_hexdigest

from deeplink.doctor.model import reason_of
from deeplink.errors import Reason, Refused
from deeplink.kvconnector.contracts.contract import Name, place
from deeplink.kvconnector.transport.base import Push, Transport

CONNECT_SECONDS = 10.0
T = TypeVar("T")


class Trial(msgspec.Struct, frozen=True):
    """`outward` is from the doctor that called to the one that listened. `length` bytes took `seconds`, after
    `connecting` seconds for the link; `reason` says why they did not arrive, or not as they were sent."""

    transport: Name
    outward: bool
    length: Annotated[int, msgspec.Meta(ge=0)] = 0
    seconds: float = 0.0
    connecting: float = 0.0
    reason: Reason | None = None

    @property
    def rate(self) -> float:
        """GB/s, 0.0 for a trial that failed."""
        return self.length / self.seconds / 1e9 if self.seconds > 0 and self.reason is None else 0.0


class Memory:
    """`length` bytes to push from and as many to be pushed to, side by side in one arena."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.arena = memoryview(mmap.mmap(-1, 2 * length))
        self.source, self.target = self.arena[:length], self.arena[length:]

    def fill(self, length: int) -> str:
        """New random bytes in `source`; their digest."""
        words = np.random.default_rng().integers(0, 1 << 64, -(-length // 8), np.uint64)
        self.source[:length] = words.view(np.uint8).data[:length]
        return xxh3_64_hexdigest(self.source[:length])

    def clear(self, length: int) -> None:
        """What came before is not taken for what comes now, and the first push does not pay for page faults."""
        np.frombuffer(self.target[:length], np.uint8)[:] = 0

    def digest(self, length: int) -> str:
        """Of what lies in `target`."""
        return xxh3_64_hexdigest(self.target[:length])


@dataclass(frozen=True, slots=True)
class Pushed:
    seconds: float
    connecting: float


def push(transport: Transport, address: str, key: bytes, source: memoryview, chunk: int, seconds: float) -> Pushed:
    """All of `source`, in pushes of `chunk` bytes as an engine makes them. Raises what the transport does.

    The first chunk is pushed once more before, untimed: a link's first bytes are slow, and engines keep their links.
    """
    begin = time.monotonic()
    deadline = begin + seconds
    link = transport.connect(address, min(deadline, begin + CONNECT_SECONDS))
    try:
        connected = time.monotonic()
        link.push([Push(source[:chunk], key, 0)], deadline)
        warm = time.monotonic()
        for piece in _cut(source, key, chunk):
            link.push([piece], deadline)
        return Pushed(time.monotonic() - warm, connected - begin)
    finally:
        link.close()


def _cut(source: memoryview, key: bytes, chunk: int) -> Iterator[Push]:
    for start in range(0, source.nbytes, chunk):
        yield Push(source[start : start + chunk], key, start)


def attempt(action: Callable[[], T]) -> T | Reason:
    """What `action` returns, or why it failed."""
    try:
        return action()
    except Exception as exc:  # noqa: BLE001 - a plugin's transport may raise anything, and saying so is the doctor's work
        return reason_of(exc)


def out_of_reach(address: str, here: str, there: str) -> Refused | None:
    """The error for a transport of a peer whose address would mean this host. `here` and `there` are the two IP
    addresses of the connection to that peer."""
    host = address.rpartition(":")[0].strip("[]")
    if place(address) or here == there or _own(there) or not _own(host):
        return None
    return Refused(
        "the other host's transport says that it is at an address which means this host here",
        field="kv.host",
        ours=f"reached it at {there}",
        theirs=host,
        remedy=f"set host under [kv] in deeplink.toml there, maybe to {there}",
    )


def _own(host: str) -> bool:
    """Whether every host means itself by it."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:  # a name
        return host == "localhost"
    return found.is_loopback or found.is_unspecified
