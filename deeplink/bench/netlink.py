"""A network between two namespaces of this machine, with a rate, a delay, losses and outages. Linux, as root.

    with between(Line(rate_mbit=500, delay_ms=10, loss=0.005)) as net:
        with net.b.entered():
            server = subprocess.Popen(…)          # or sockets and threads made here: they stay in b
        with net.a.entered():
            …                                     # reaches the server at net.b.address
        net.cut(2.0)                              # nothing passes for the next two seconds

A namespace has no name: it lives as long as something in it does or a descriptor refers to it, so nothing is left
behind whichever way this process ends. A plain rate is shaped by the kernel (veth and tbf). Delay, loss and outages
need netem, which many kernels lack; for those a process of its own passes packets between two tun devices, at up to
about 800 Mbit/s.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
DEVICE = "dl0"
HERE = "/proc/thread-self/ns/net"
START_SECONDS = 10.0


class Unavailable(OSError):
    """Namespaces or their devices cannot be made here; the text says what is missing."""


@dataclass(frozen=True)
class Line:
    """`delay_ms` is one way. `loss` is the share of packets lost, in either direction."""

    rate_mbit: float
    delay_ms: float = 0.0
    loss: float = 0.0
    mtu: int = 9000
    relayed: bool = False
    """Through the relay also without delay and loss, for `cut`."""


@dataclass(frozen=True)
class Namespace:
    """One end. `address` is its IPv4 address, reached from the other end."""

    descriptor: int
    address: str

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and what it starts meanwhile, is in the namespace: processes, threads, and sockets for good."""
        back = os.open(HERE, os.O_RDONLY)
        try:
            _libc("setns", self.descriptor, CLONE_NEWNET)
            try:
                yield
            finally:
                _libc("setns", back, CLONE_NEWNET)
        finally:
            os.close(back)

    def run(self, *command: str) -> None:
        with self.entered():
            try:
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=START_SECONDS)
            except (OSError, subprocess.SubprocessError) as exc:
                said = getattr(exc, "stderr", "") or ""
                raise Unavailable(f"{' '.join(command)}: {exc} {said}".strip()) from exc


@dataclass(frozen=True)
class Net:
    a: Namespace
    b: Namespace
    _relay: subprocess.Popen[str] | None = None

    def cut(self, seconds: float) -> None:
        """From now on, for that long, every packet is lost. Only where the line is relayed."""
        assert self._relay is not None
        assert self._relay.stdin is not None
        self._relay.stdin.write(f"{seconds}\n")
        self._relay.stdin.flush()


@contextlib.contextmanager
def between(line: Line) -> Iterator[Net]:
    """Two namespaces joined by `line`. Raises Unavailable."""
    with contextlib.ExitStack() as undo:
        ends = [Namespace(_new(undo), address) for address in ("10.77.0.1", "10.77.0.2")]
        relay = None
        if line.delay_ms or line.loss or line.relayed:
            relay = _relayed(undo, ends, line)
        else:
            _shaped(ends, line)
        for end in ends:
            end.run("ip", "link", "set", "lo", "up")
            end.run("ip", "address", "add", f"{end.address}/24", "dev", DEVICE)
            end.run("ip", "link", "set", DEVICE, "mtu", str(line.mtu), "txqueuelen", "2000", "up")
        yield Net(ends[0], ends[1], relay)


def identity() -> int:
    """Of the network namespace that this thread is in."""
    return os.stat(HERE).st_ino


def _new(undo: contextlib.ExitStack) -> int:
    """The descriptor of a new namespace, which a thread that ends at once makes: a thread cannot go back by itself."""
    made: list[int | OSError] = []

    def make() -> None:
        try:
            _libc("unshare", CLONE_NEWNET)
            made.append(os.open(HERE, os.O_RDONLY))
        except OSError as exc:
            made.append(exc)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    descriptor = made[0]
    if isinstance(descriptor, OSError):
        raise Unavailable(f"network namespaces cannot be made here: {descriptor}") from descriptor
    undo.callback(os.close, descriptor)
    return descriptor


def _shaped(ends: list[Namespace], line: Line) -> None:
    peer = f"/proc/{os.getpid()}/fd/{ends[1].descriptor}"
    ends[0].run("ip", "link", "add", "name", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", peer)
    for end in ends:
        rate = f"{line.rate_mbit:g}mbit"
        end.run("tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", "rate", rate, "burst", "128kb", "latency", "20ms")


def _relayed(undo: contextlib.ExitStack, ends: list[Namespace], line: Line) -> subprocess.Popen[str]:
    descriptors = []
    for end in ends:
        with end.entered():
            try:
                descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                undo.callback(os.close, descriptor)
                fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
            except OSError as exc:
                raise Unavailable(f"no tun device can be made here: {exc}") from exc
        descriptors.append(descriptor)
    arguments = [*descriptors, line.rate_mbit, line.delay_ms, line.loss]
    relay = subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)], stdin=subprocess.PIPE, text=True, pass_fds=descriptors
    )
    undo.callback(_end, relay)
    return relay


def _end(relay: subprocess.Popen[str]) -> None:
    relay.kill()
    relay.wait()
    if relay.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            relay.stdin.close()


def _libc(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


# -- the relay's own process -------------------------------------------------------------------------------------


@dataclass
class Way:
    """One direction: packets wait for their turn at `rate` bytes/s, and then for `delay` seconds."""

    target: int
    rate: float
    delay: float
    room: float
    """Bytes that wait at most; more are lost, as at the queue of a router."""
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    size: int = 0
    free: float = 0.0

    def take(self, packet: bytes, now: float) -> None:
        if self.size + len(packet) > self.room:
            return
        self.free = max(self.free, now) + len(packet) / self.rate
        self.waiting.append((self.free + self.delay, packet))
        self.size += len(packet)

    def deliver(self, now: float) -> None:
        while self.waiting and self.waiting[0][0] <= now:
            packet = self.waiting.popleft()[1]
            self.size -= len(packet)
            with contextlib.suppress(BlockingIOError, OSError):  # a device that is down loses packets too
                os.write(self.target, packet)


def relay(a: int, b: int, rate_mbit: float, delay_ms: float, loss: float) -> None:
    rate, delay = rate_mbit * 125e3, delay_ms / 1e3
    room = max(1e6, 4 * rate * delay)
    ways = {a: Way(b, rate, delay, room), b: Way(a, rate, delay, room)}
    chance = random.Random(0)
    poll = select.epoll()
    for descriptor in (a, b, sys.stdin.fileno()):
        poll.register(descriptor, select.EPOLLIN)
    cut_until = 0.0
    while True:
        due = min((way.waiting[0][0] for way in ways.values() if way.waiting), default=None)
        timeout = None if due is None else max(0.0, due - time.monotonic())
        for descriptor, _ in poll.poll(timeout):
            if descriptor not in ways:
                order = os.read(descriptor, 100).split()
                if not order:
                    return
                cut_until = time.monotonic() + float(order[-1])
                continue
            for packet in _packets(descriptor):
                now = time.monotonic()
                if now >= cut_until and chance.random() >= loss:
                    ways[descriptor].take(packet, now)
        for way in ways.values():
            way.deliver(time.monotonic())


def _packets(descriptor: int) -> Iterator[bytes]:
    with contextlib.suppress(BlockingIOError):
        for _ in range(64):
            yield os.read(descriptor, 1 << 16)


if __name__ == "__main__":
    relay(int(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:]))
