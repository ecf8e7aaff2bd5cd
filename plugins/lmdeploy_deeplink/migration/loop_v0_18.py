"""What the loop and the scheduler of LMDeploy 0.18 do otherwise with ``--migration-backend deeplink``.

Prefill: the loop offers a prompt's cache when it answers; a session whose cache is offered ends, and frees its blocks,
when that is staged. Decode: the loop loads a cache without keeping others waiting, once nothing that was sent to the
model before can write into its blocks; a request whose cache does not come fails alone. Either: before a session's
blocks may go to others, nothing of deeplink's reads or writes them any more.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import Any

from deeplink.errors import DeeplinkError
from lmdeploy_deeplink.migration.forwards import Forwards

# Between two looks whether a prompt's cache is staged, where staging was full.
_STAGED_LOOK = 0.02

log = logging.getLogger("lmdeploy.deeplink")


def install() -> None:
    import lmdeploy.pytorch.engine.engine as engines
    import lmdeploy.pytorch.engine.engine_loop as loops
    from lmdeploy.pytorch.paging.scheduler import Scheduler

    loop = loops.EngineLoop
    loop._make_infer_outputs = _offering(loop._make_infer_outputs)
    loop._migration_loop_process_ready = _loading(loop._migration_loop_process_ready)
    engines.Engine._on_end_session = _ending(engines.Engine._on_end_session)
    engines.Engine.end_session = _dropping(engines.Engine.end_session)
    engines.Engine._loop_finally = _closing(engines.Engine._loop_finally)
    Scheduler.end_session = _leaving(Scheduler.end_session)
    Scheduler.stop_session = _leaving(Scheduler.stop_session)


def count(agent: Any, forwards: Forwards) -> None:
    """Have `forwards` count what this model agent is sent, and what of that is over."""
    send, run, drain = agent.set_forward_inputs, agent._async_step, agent._drain_queues

    def sent(inputs: Any) -> None:
        send(inputs)
        forwards.send()

    async def ran(*args: Any, **keywords: Any) -> None:
        try:
            await run(*args, **keywords)
        finally:
            forwards.end()

    def drained() -> None:
        """An engine that goes to sleep drops what it has not begun."""
        dropped = sum(queue.qsize() for queue in (agent._pre_in_que, agent._in_que) if queue is not None)
        drain()
        forwards.end(dropped)

    agent.set_forward_inputs, agent._async_step, agent._drain_queues = sent, ran, drained


def _ours(owner: Any) -> Any:
    """The connection of an engine or of its loop, if it is ours."""
    connection = owner.engine_conn
    return connection if hasattr(connection, "exchange") else None


def _extra(sequence: Any) -> list[str]:
    """What but the tokens decides a prompt's cache."""
    return [f"lora={sequence.adapter_name}"] if sequence.adapter_name else []


def _offering(make: Callable[..., Any]) -> Callable[..., Any]:
    """Prefill: an answer that tells its blocks offers what is in them, and tells the handoff's number instead."""

    @functools.wraps(make)
    def made(self: Any, batched_outputs: Any, running: Any, model_inputs: Any, delta: Any) -> Any:
        outputs = make(self, batched_outputs, running, model_inputs, delta)
        connection = _ours(self)
        for sequence in running if connection is not None else ():
            out = outputs.get(sequence.session_id)
            if out is None or out.cache_block_ids is None:
                continue
            table, out.cache_block_ids = out.cache_block_ids, []
            prompt = sequence.all_ids[: sequence.num_all_ids - sequence.num_new_tokens]
            try:
                number = connection.exchange.offer(prompt.tolist(), _extra(sequence), table)
            except DeeplinkError as exc:
                log.warning("deeplink offers nothing of session %s: %s", sequence.session_id, exc)
                continue
            out.cache_block_ids = [number]
            connection.offered[sequence.session_id] = number
        return outputs

    return made


def _ending(end: Callable[..., Any]) -> Callable[..., Any]:
    """Prefill: a session whose cache is offered frees its blocks when all of it is staged, which is at once or soon."""
    from lmdeploy.messages import ResponseType

    async def when_staged(engine: Any, connection: Any, session: int, number: int) -> None:
        while not connection.exchange.settled(number):
            await asyncio.sleep(_STAGED_LOOK)
        # It may have been ended otherwise, and the number of the session be another's.
        if connection.offered.get(session) == number:
            engine.end_session(session)

    @functools.wraps(end)
    def ended(self: Any, reqs: Any, **keywords: Any) -> Any:
        connection = _ours(self)
        others = []
        for req in reqs:
            session = req.data["session_id"]
            held = self.scheduler.get_session(session)
            kept = held is not None and any(one.preserve_cache for one in held.sequences.values())
            if connection is None or not kept:
                others.append(req)
                continue
            number = connection.offered.get(session)
            if number is None or connection.exchange.settled(number):
                self.end_session(session)
            else:
                connection.start(when_staged(self, connection, session, number))
            if req.data.get("response", True):
                self._response(req.resp, ResponseType.SUCCESS)
        return end(self, others, **keywords)

    return ended


def _dropping(end: Callable[..., Any]) -> Callable[..., Any]:
    """Prefill: a router that gives up frees a session by its answer's id, which here is the handoff's number."""
    from lmdeploy_deeplink.migration.exchange import NUMBERS

    @functools.wraps(end)
    def ended(self: Any, session_id: int) -> Any:
        connection = _ours(self)
        if connection is None or session_id < NUMBERS:
            return end(self, session_id)
        connection.exchange.drop(session_id)
        return True

    return ended


def _loading(process: Callable[..., Any]) -> Callable[..., Any]:
    """Decode: every request loads by itself, so one that waits, or fails, is no other's business."""
    from lmdeploy.messages import ResponseType
    from lmdeploy.pytorch.engine.engine import response_reqs
    from lmdeploy.pytorch.messages import MessageStatus

    async def load(loop: Any, connection: Any, sequence: Any) -> None:
        asked, session = sequence.migration_request, sequence.session_id
        try:
            await connection.forwards.passed(connection.exchange.seconds)
            # Whoever asked may have left in the meantime, and the blocks be another's.
            if sequence.status != MessageStatus.MIGRATION_READY:
                return
            await connection.exchange.load(
                session,
                asked.remote_engine_id,
                asked.remote_block_ids,
                sequence.all_ids.tolist(),
                _extra(sequence),
                loop.scheduler.get_block_tables([sequence])[0].tolist(),
            )
        except DeeplinkError as exc:
            log.warning("deeplink handoff for session %s failed: %s (%s)", session, exc, exc.code)
            if sequence.status == MessageStatus.MIGRATION_READY:
                text = str(exc)
                response_reqs(loop.req_manager, sequence.resp, ResponseType.INTERNAL_ENGINE_ERROR, err_msg=text)
            return
        if sequence.status == MessageStatus.MIGRATION_READY:
            await answer(loop, sequence)

    async def answer(loop: Any, sequence: Any) -> None:
        with loop.scheduler.seqs_migration_activation([sequence]):
            await loop._migration_loop_get_outputs([sequence])
        loop.has_runable_event.set()

    @functools.wraps(process)
    async def processed(self: Any, migration_ready: Any) -> None:
        connection = _ours(self)
        if connection is None:
            await process(self, migration_ready)
            return
        for sequence in migration_ready:
            if sequence.migration_request.is_dummy_prefill:
                await answer(self, sequence)
            else:
                connection.start(load(self, connection, sequence))

    return processed


def _leaving(end: Callable[..., Any]) -> Callable[..., Any]:
    """Before a session's blocks may go to others, nothing of ours reads or writes them any more."""

    @functools.wraps(end)
    def ended(self: Any, session_id: int) -> Any:
        connection = getattr(self, "deeplink", None)
        if connection is not None:
            connection.leave(session_id)
        return end(self, session_id)

    return ended


def _closing(close: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(close)
    def closed(self: Any) -> Any:
        connection = _ours(self)
        if connection is not None:
            connection.exchange.close()
        return close(self)

    return closed
