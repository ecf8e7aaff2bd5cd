"""What is done beside what the process does already."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from vllm_deeplink import termination


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_both_are_called() -> None:
    called: list[str] = []
    signal.signal(signal.SIGTERM, lambda number, frame: called.append("engine"))
    termination.also(lambda: called.append("ours"))
    os.kill(os.getpid(), signal.SIGTERM)
    assert called == ["ours", "engine"]


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_process_that_has_no_handler_stays_so(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGTERM, handler)
    termination.also(lambda: None)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_in_another_thread() -> None:
    signal.signal(signal.SIGTERM, ours := lambda number, frame: None)
    thread = threading.Thread(target=termination.also, args=(lambda: None,))
    thread.start()
    thread.join(10)
    assert signal.getsignal(signal.SIGTERM) is ours
