"""Which transports run, in which order, and what becomes of those that do not."""

from __future__ import annotations

import pytest

from deeplink.errors import ConfigError
from deeplink.kvconnector.transport.base import Capabilities, Link, Region
from deeplink.kvconnector.transport.start import start


class Made:
    name = "made"

    def __init__(
        self, cross_host: bool, preference: int = 0, *, authenticated: bool = True, takes: int = 1 << 30
    ) -> None:
        self.capabilities = Capabilities(frozenset({"dram"}), cross_host, authenticated, preference)
        self.address = "somewhere"
        self.closed = False
        self.staged: list[memoryview] = []
        self._takes = takes

    def stage(self, memory: memoryview) -> None:
        if memory.nbytes > self._takes:
            raise RuntimeError("too large to be registered")
        self.staged.append(memory)

    def register(self, memory: memoryview) -> Region:
        raise AssertionError("nothing is moved here")

    def connect(self, address: str, deadline: float) -> Link:
        raise AssertionError("nothing is moved here")

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
        start({"broken": broken}, "127.0.0.1", b"secret").require()
    with pytest.raises(ConfigError, match="no plugin has one"):
        start({}, "127.0.0.1", b"secret").require()


class Open:
    """Of a library that cannot authenticate; it is not even loaded unless the network is trusted."""

    capabilities = Capabilities(frozenset({"dram"}), True, False, revocable=False)

    def __init__(self, host: str, secret: bytes) -> None:
        raise RuntimeError("it was loaded")


@pytest.mark.parametrize("trust", [(), ("peers",)])
def test_one_that_cannot_authenticate_is_not_started(trust: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    """Whether its factory says so or only what it has made."""
    late = Made(True, authenticated=False)
    factories = {"good": lambda host, secret: Made(True), "open": Open, "late": lambda host, secret: late}
    started = start(factories, "127.0.0.1", b"secret", *trust)
    assert list(started.running) == ["good"]
    for name in ("open", "late"):
        reason = started.failed[name]
        assert isinstance(reason, ConfigError)
        assert (reason.field, reason.ours, reason.theirs) == ("kv.trust", "peers", "fabric")
        assert 'trust = "fabric"' in reason.remedy
    assert late.closed
    assert not caplog.text  # nobody asked for them


def test_on_a_trusted_network_it_is() -> None:
    late = Made(True, authenticated=False)
    started = start({"late": lambda host, secret: late, "open": Open}, "127.0.0.1", b"secret", "fabric")
    assert list(started.running) == ["late"]
    assert str(started.failed["open"]) == "it was loaded"


def test_one_that_does_not_take_the_staging_memory_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    small, good = Made(True, 5, takes=100), Made(True)
    started = start(
        {"small": lambda host, secret: small, "good": lambda host, secret: good}, "127.0.0.1", b"secret"
    ).stage([memoryview(bytes(50)), memoryview(bytes(500))])
    assert list(started.running) == ["good"]
    assert [arena.nbytes for arena in good.staged] == [50, 500]
    assert small.closed
    assert "too large" in str(started.failed["small"])
    assert "small cannot use the staging memory" in caplog.text
    with pytest.raises(ConfigError, match="too large"):
        start({"small": lambda host, secret: Made(True, takes=1)}, "127.0.0.1", b"secret").stage([memoryview(bytes(2))])
