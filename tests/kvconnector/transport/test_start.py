"""Which transports run, in which order, and what becomes of those that do not."""

from __future__ import annotations

import pytest

from deeplink.errors import ConfigError
from deeplink.kvconnector.transport.base import Capabilities, Link, Region
from deeplink.kvconnector.transport.start import start


class Made:
    name = "made"

    def __init__(self, cross_host: bool, preference: int = 0) -> None:
        self.capabilities = Capabilities(frozenset({"dram"}), cross_host, True, preference)
        self.address = "somewhere"
        self.closed = False

    def register(self, memory: memoryview) -> Region:
        raise NotImplementedError

    def connect(self, address: str, deadline: float) -> Link:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True


def test_the_order_follows_from_the_capabilities() -> None:
    factories = {
        "a": lambda host, secret: Made(True),
        "b": lambda host, secret: Made(True, 5),
        "c": lambda host, secret: Made(False),
        "d": lambda host, secret: Made(True),
    }
    started = start(factories, "127.0.0.1", b"secret")
    assert list(started.running) == list(started.addresses) == ["c", "b", "a", "d"]
    started.close()
    assert all(transport.closed for transport in started.running.values())  # type: ignore[attr-defined]


def test_one_that_does_not_start_is_kept_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    def broken(host: str, secret: bytes) -> Made:
        raise RuntimeError("no such device")

    started = start({"good": lambda host, secret: Made(True), "broken": broken}, "127.0.0.1", b"secret")
    assert list(started.running) == ["good"]
    assert str(started.failed["broken"]) == "no such device"
    assert "broken does not start here: no such device" in caplog.text


def test_none_is_an_error_that_says_why() -> None:
    def broken(host: str, secret: bytes) -> Made:
        raise OSError("not here")

    with pytest.raises(ConfigError, match="broken: not here"):
        start({"broken": broken}, "127.0.0.1", b"secret")
    with pytest.raises(ConfigError, match="no plugin has one"):
        start({}, "127.0.0.1", b"secret")
