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

import numpy as np

from deeplink.errors import Aborted, DeeplinkError
from deeplink.kvconnector.handoffs.ticket import Ticket
from lmdeploy_deeplink.migration import passage, requests
from lmdeploy_deeplink.migration.foreign import NUMBERS
from lmdeploy_deeplink.migration.forwards import Forwards, SpreadForwards
from lmdeploy_deeplink.migration.part import STAGED_LOOK
from lmdeploy_deeplink.migration.requests import Admitted

log = logging.getLogger("lmdeploy.deeplink")


def install() -> None:
    import lmdeploy.pytorch.engine.engine as engines
    import lmdeploy.pytorch.engine.engine_loop as loops
    from lmdeploy.pytorch.paging.scheduler import Scheduler

    loop = loops.EngineLoop
    loop._make_infer_outputs = _offering(loop._make_infer_outputs)
    loop._migration_loop_process_ready = _loading(loop._migration_loop_process_ready)
    engines.Engine._on_add_message = _admitting(engines.Engine._on_add_message)
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


def count_sent(executor: Any, forwards: SpreadForwards) -> None:
    """Have `forwards` count what this executor sends its workers, which count what of that is over."""
    send = executor.forward_async

    async def sent(inputs: Any) -> None:
        forwards.send()  # from here on it is as good as sent: what is in it does not change
        await send(inputs)

    executor.forward_async = sent


def _ours(owner: Any) -> Any:
    """The connection of an engine or of its loop, if it is ours."""
    connection = owner.engine_conn
    return connection if hasattr(connection, "exchange") else None


def _admitting(add: Callable[..., Any]) -> Callable[..., Any]:
    """A request with a ticket that is not for this engine fails alone; prefill keeps its cache until that is staged."""
    from lmdeploy.messages import ResponseType

    def admit(engine: Any, connection: Any, req: Any) -> bool:
        data = req.data
        found = passage.read(data.get("migration_request"))
        if found is None or engine.scheduler.get_session(data["session_id"]) is None:
            return True
        try:
            ticket = connection.exchange.admit(*found)
        except DeeplinkError as exc:
            log.warning("deeplink: session %s is refused: %s", data["session_id"], exc)
            engine._response(req.resp, ResponseType.INTERNAL_ENGINE_ERROR, err_msg=str(exc))
            return False
        connection.tickets[data["session_id"]] = Admitted.now(ticket)
        if found[0] == passage.PRODUCE:
            data.update(migration_request=None, with_cache=False, preserve_cache=True)
        return True

    @functools.wraps(add)
    def added(self: Any, reqs: Any, **keywords: Any) -> Any:
        connection = _ours(self)
        if connection is not None:
            reqs = [req for req in reqs if admit(self, connection, req)]
        return add(self, reqs, **keywords)

    return added


def _offering(make: Callable[..., Any]) -> Callable[..., Any]:
    """Prefill: an answer that has a ticket, or tells its blocks, offers what is in them; in place of block numbers it
    tells the handoff's."""

    @functools.wraps(make)
    def made(self: Any, batched_outputs: Any, running: Any, model_inputs: Any, delta: Any) -> Any:
        outputs = make(self, batched_outputs, running, model_inputs, delta)
        connection = _ours(self)
        for sequence in running if connection is not None else ():
            out = outputs.get(sequence.session_id)
            admitted = connection.tickets.pop(sequence.session_id, None) if out is not None else None
            if out is None or (admitted is None and out.cache_block_ids is None):
                continue
            try:
                number, ticket = (0, admitted.left()) if admitted else connection.exchange.foreign.to_offer()
                _offer(self, connection, sequence, out, ticket)
            except DeeplinkError as exc:
                log.warning("deeplink offers nothing of session %s: %s", sequence.session_id, exc)
                number = 0
            if out.cache_block_ids is not None:
                out.cache_block_ids = [number] if number else []
        return outputs

    return made


def _offer(loop: Any, connection: Any, sequence: Any, out: Any, ticket: Ticket) -> None:
    stop = sequence.num_all_ids - sequence.num_new_tokens
    prompt = sequence.all_ids[:stop].tolist()
    table = loop.scheduler.get_block_tables([sequence])[0].tolist()
    try:
        identity = requests.identity(sequence)
    except DeeplinkError as exc:
        connection.exchange.withhold(ticket, exc)
        raise
    first = requests.first_token(int(sequence.all_ids[stop]), out.logprobs)
    connection.exchange.offer(ticket, prompt, identity, table, first)
    connection.offered[sequence.session_id] = ticket.handoff


def _ending(end: Callable[..., Any]) -> Callable[..., Any]:
    """Prefill: a session whose cache is offered frees its blocks when all of it is staged, which is at once or soon."""
    from lmdeploy.messages import ResponseType

    async def when_staged(engine: Any, connection: Any, session: int, held: Any, name: str) -> None:
        while not connection.exchange.settled(name):
            await asyncio.sleep(STAGED_LOOK)
        # It may have been ended otherwise, and the number of the session be another's. That it was stopped in the
        # meantime, and its offer dropped, does not end it.
        if engine.scheduler.get_session(session) is held:
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
            name = connection.offered.get(session)
            if name is None or connection.exchange.settled(name):
                self.end_session(session)
            else:
                connection.start(when_staged(self, connection, session, held, name))
            if req.data.get("response", True):
                self._response(req.resp, ResponseType.SUCCESS)
        return end(self, others, **keywords)

    return ended


def _dropping(end: Callable[..., Any]) -> Callable[..., Any]:
    """Prefill: a router that gives up frees a session by its answer's id, which here is the handoff's number."""

    @functools.wraps(end)
    def ended(self: Any, session_id: int) -> Any:
        connection = _ours(self)
        if connection is None or session_id < NUMBERS:
            return end(self, session_id)
        connection.exchange.drop(connection.exchange.foreign.name(session_id))
        return True

    return ended


def _loading(process: Callable[..., Any]) -> Callable[..., Any]:
    """Decode: every request loads by itself, so one that waits, or fails, is no other's business."""
    from lmdeploy.messages import ResponseType
    from lmdeploy.pytorch.engine.engine import response_reqs
    from lmdeploy.pytorch.messages import MessageStatus

    async def load(loop: Any, connection: Any, sequence: Any) -> None:
        session, exchange = sequence.session_id, connection.exchange
        asked, ticket = connection.tickets.pop(session, None), None
        try:
            if asked is None:
                request = sequence.migration_request
                ticket = exchange.foreign.to_load(request.remote_engine_id, request.remote_block_ids)
                asked = Admitted.now(ticket)
            else:
                ticket = asked.ticket
            identity = requests.identity(sequence)
            await connection.forwards.passed(asked.seconds)
            # Whoever asked may have left in the meantime, and the blocks be another's.
            if sequence.status != MessageStatus.MIGRATION_READY:
                raise Aborted("the decode request was given up")
            table = loop.scheduler.get_block_tables([sequence])[0].tolist()
            first = await exchange.load(session, asked.left(), sequence.all_ids.tolist(), identity, table)
            logprobs = requests.logprobs(sequence.sampling_param, first)
        except DeeplinkError as exc:
            log.warning("deeplink handoff for session %s failed: %s (%s)", session, exc, exc.code)
            if ticket is not None:
                exchange.refuse(ticket, exc)
            if sequence.status == MessageStatus.MIGRATION_READY:
                text = str(exc)
                response_reqs(loop.req_manager, sequence.resp, ResponseType.INTERNAL_ENGINE_ERROR, err_msg=text)
            return
        if sequence.status == MessageStatus.MIGRATION_READY:
            await go_on(loop, sequence, first.token, logprobs)

    async def go_on(loop: Any, sequence: Any, token: int, logprobs: list[dict[int, float]] | None) -> None:
        """From the first token; LMDeploy would also go on where that is the last."""
        if requests.is_last(sequence.sampling_param, token):
            data = dict.fromkeys(("logits", "cache_block_ids", "req_metrics", "routed_experts", "ce_loss"))
            data |= {"token_ids": np.array([token]), "logprobs": logprobs}
            response_reqs(loop.req_manager, sequence.resp, ResponseType.FINISH, data=data)
            return
        sequence.migration_request.remote_token_id = token
        if logprobs is not None:
            sequence.resp.data = {"logprobs": logprobs}
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
