"""How an engine of LMDeploy 0.18 calls its workers, which Ray runs, with what deeplink has them do.

LMDeploy's own migrations go the same way: the engine's process calls a method of each worker. The worker has it from
`install`, which has to have run in both processes before Ray starts the worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from deeplink.errors import ConfigError, DeadlineExceeded, DeeplinkError, PeerGone, Reason
from deeplink.kvconnector.contracts import contract as co
from lmdeploy_deeplink.migration.forwards import Forwards

if TYPE_CHECKING:
    from lmdeploy_deeplink.migration.adapter import Stated
    from lmdeploy_deeplink.migration.spread import Spread

ASK_SECONDS = 600.0
"""A worker comes to a call when the forward that it is in has ended."""

log = logging.getLogger("lmdeploy.deeplink")

Answer = tuple[Any, Reason | None]
"""What a worker gives back, or why not. An error of deeplink's is not raised through Ray, which makes another of it."""


def install() -> None:
    from lmdeploy.pytorch.engine.executor.base_worker import WorkerWrapperBase

    WorkerWrapperBase.deeplink_start = _start
    WorkerWrapperBase.deeplink_call = _call


def spread(engine: Any, stated: Stated, epoch: str) -> Spread:
    """The cache of an engine's workers. Raises what keeps one of them from handing it over."""
    from lmdeploy_deeplink.migration.spread import Spread

    answers = engine.executor.collective_rpc("deeplink_start", (engine.model_config.num_key_value_heads, stated, epoch))
    return Spread(Calls(engine.executor), [co.decode(_value(answer)) for answer in answers])


class Calls:
    """Of the workers of `executor`."""

    def __init__(self, executor: Any) -> None:
        if not hasattr(executor, "workers"):
            raise ConfigError(
                "an engine of several processes hands over where Ray runs them",
                field="distributed-executor-backend",
                ours="ray",
                remedy="start the engine with --distributed-executor-backend ray",
            )
        self._workers = executor.workers

    def call(self, method: str, *arguments: Any) -> list[Awaitable[Any]]:
        return [_answered(answer) for answer in self._called(method, arguments)]

    def tell(self, method: str, *arguments: Any) -> None:
        self._called(method, arguments)

    def ask(self, method: str, *arguments: Any) -> None:
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        deadline = time.monotonic() + ASK_SECONDS
        for answer in self._called(method, arguments):
            try:
                _value(ray.get(answer, timeout=max(0.0, deadline - time.monotonic())))
            except GetTimeoutError as exc:
                raise DeadlineExceeded(
                    f"a worker has not answered in {ASK_SECONDS:g} s to {method}",
                    remedy="the engine is stuck; see its log",
                ) from exc
            except RayError as exc:
                # What has gone neither reads nor writes; LMDeploy ends an engine that has lost a worker.
                log.error("deeplink: a worker has gone: %s", exc)

    def _called(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        return [worker.deeplink_call.remote(method, *arguments) for worker in self._workers]


async def _answered(answer: Any) -> Any:
    from ray.exceptions import RayError

    try:
        return _value(await answer)
    except RayError as exc:
        raise PeerGone(f"a worker of this engine has gone: {exc}") from exc


def _value(answer: Answer) -> Any:
    value, reason = answer
    if reason is not None:
        raise DeeplinkError.from_reason(reason)
    return value


# -- in a worker ---------------------------------------------------------------------------------------------


def _start(wrapper: Any, heads: int, stated: Stated, epoch: str) -> Answer:
    """The encoded contract of this worker, which listens from now on."""
    from lmdeploy_deeplink.migration import loop_v0_18, worker
    from lmdeploy_deeplink.migration.adapter import Place

    forwards = Forwards()
    loop_v0_18.count(wrapper.model_agent, forwards)
    place = Place(wrapper.rank, wrapper.world_size)
    try:
        made = worker.start(wrapper.model_agent.cache_engine, heads, place, stated, epoch, forwards)
    except DeeplinkError as exc:
        return None, exc.reason()
    wrapper.deeplink = made
    return made.contract, None


async def _call(wrapper: Any, method: str, *arguments: Any) -> Answer:
    try:
        return await getattr(wrapper.deeplink, method)(*arguments), None
    except DeeplinkError as exc:
        return None, exc.reason()
