"""What of LMDeploy 0.18 is changed in memory for an engine on the CPU in several worker processes of LMDeploy's own.

An engine sends its workers what they have to do through a ring of 32 places, and all of them meet where it begins
again. A worker waits there on the thread of its loop, which also computes. On a GPU nothing that it computes waits for
another worker on that thread. On a CPU a sum over the workers does: one of them then waited in the ring, another for
its part of a sum that it would have computed next, and the engine for both; no request was answered any more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any


def install() -> None:
    """In the engine's process and in its workers', before they talk."""
    from lmdeploy.pytorch.engine.executor.mp_executor import Notifier

    Notifier.wait_async = _wait_off_the_loop


@contextlib.asynccontextmanager
async def _wait_off_the_loop(notifier: Any) -> AsyncIterator[None]:
    """What LMDeploy does where it has a thread of its own for it; all of the waiting, and not only the first half."""
    run = asyncio.get_running_loop().run_in_executor
    waiting = notifier.wait()
    await run(None, waiting.__enter__)
    yield
    await run(None, waiting.__exit__, None, None, None)
