"""The signal that ends an engine.

vLLM's engine core asks its connector to shut down after all its workers have ended, and may be killed before. What has
to be said earlier is said when the signal comes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


def also(call: Callable[[], None]) -> None:
    """Beside what the process does on SIGTERM already, make this call. It must not block, nor take a lock.

    Nothing is changed where the signal has no handler, or in a thread that may not set one: there the process is not
    the engine's own.
    """
    before = signal.getsignal(signal.SIGTERM)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        return

    def handler(number: int, frame: FrameType | None) -> None:
        call()
        before(number, frame)

    signal.signal(signal.SIGTERM, handler)
