"""Everything of LMDeploy 0.18 that is changed in memory, and why. Nothing else touches LMDeploy's own names.

- The option ``--backend deeplink`` (its parsers are built when the command line runs), which stands for the PyTorch
  engine on the device of this host.
- Lists of device names that are closed, for the device ``cpu``: the check of `PytorchEngineConfig`, the choices of
  ``--device``, which backend a device has, its batch size, and whether it has bfloat16.
- The channel through which an engine's process says its port: LMDeploy ends it as soon as the port is there, while the
  process may still be saying it, and a start then fails now and then on a busy host.
- ``--migration-backend deeplink``: one more `MigrationBackend`; with it an engine's connection is `Connection`, its
  loop offers a prompt's cache when it answers, and loads one without keeping others waiting; a request whose cache
  does not come fails alone; sessions whose cache is offered end, and free their blocks, when it is staged; and an
  answer that offers one has its number as its id, which LMDeploy's router takes for a session's; what an engine says of
  itself names its migration backend, by which deeplink's router knows that contracts are compared. A prefill engine
  refuses prompts that it would have to compute in pieces, which LMDeploy does not get to the end of.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from deeplink.errors import DeeplinkError
from lmdeploy_deeplink.engine.platform import CPU

OPTION = "deeplink"
# What a CPU serves at once is bounded by its arithmetic long before.
_CPU_BATCH = 64

# Between two looks whether a prompt's cache is staged, where staging was full.
_STAGED_LOOK = 0.02

_installed: set[str] = set()
log = logging.getLogger("lmdeploy.deeplink")


def install(device: str) -> None:
    """For one process; a second call changes nothing. To be called before LMDeploy is used."""
    if device in _installed:
        return
    _installed.add(device)
    if device == CPU:
        from lmdeploy_deeplink.engine import cpu

        cpu.install()
        _know_cpu()
    _add_option(device)
    _wait_for_the_port()
    _add_migration()


def _add_option(device: str) -> None:
    from lmdeploy.cli.cli import CLI
    from lmdeploy.cli.utils import ArgumentHelper

    add = ArgumentHelper.backend

    def backend(parser: Any) -> Any:
        action = add(parser)
        action.choices = [*action.choices, OPTION]
        action.help = f"{action.help}; {OPTION} is the PyTorch engine on the device of this host, here {device}"
        return action

    ArgumentHelper.backend = staticmethod(backend)
    parse = CLI.parser.parse_args

    def parse_args(*args: Any, **keywords: Any) -> Any:
        words = parse(*args, **keywords)
        if getattr(words, "backend", None) == OPTION:
            words.backend, words.device = "pytorch", device
        if getattr(words, "migration_backend", None) == OPTION:
            _tell_routers()
        return words

    CLI.parser.parse_args = parse_args


def _know_cpu() -> None:
    import lmdeploy.messages as messages
    import lmdeploy.utils as utils
    from lmdeploy.cli.utils import ArgumentHelper

    config = messages.PytorchEngineConfig
    check = config.__post_init__

    def checked(self: Any) -> None:
        if self.device_type != CPU:
            check(self)
            return
        # All that is checked of another device holds of this one, but its name.
        self.device_type = "maca"
        try:
            check(self)
        finally:
            self.device_type = CPU

    config.__post_init__ = checked
    default, choices = ArgumentHelper.device.__defaults__
    ArgumentHelper.device.__defaults__ = (default, [*choices, CPU])
    utils.get_max_batch_size = _with_cpu(utils.get_max_batch_size, _CPU_BATCH)
    utils.is_bf16_supported = _with_cpu(utils.is_bf16_supported, True)
    # `lmdeploy.utils` was imported by name by those that came first.
    import lmdeploy.cli.serve as serve

    serve.get_max_batch_size = utils.get_max_batch_size

    import lmdeploy.pytorch.backends.selector as selector

    native = selector._get_backend

    def get_backend() -> Any:
        if selector.get_device_manager().current_context().device_type == CPU:
            return _cpu_backend()
        return native()

    selector._get_backend = get_backend


def _with_cpu(function: Callable[..., Any], value: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(device_type: str = "cuda") -> Any:
        # "cuda" is what an engine says when it means its device.
        return value if device_type in (CPU, "cuda", "auto") else function(device_type)

    return called


@functools.cache
def _cpu_backend() -> Any:
    from lmdeploy_deeplink import reference
    from lmdeploy_deeplink.engine.ops_v0_18 import backend

    return backend(reference.load(), "gloo")


def _wait_for_the_port() -> None:
    import lmdeploy.pytorch.engine.mp_engine.zmq_engine as zmq_engine

    processes = zmq_engine.mp
    kept: list[Any] = []

    def manager() -> Any:
        kept.append(processes.Manager())
        # It ends with this process, instead of when the port is known.
        return contextlib.nullcontext(kept[-1])

    zmq_engine.mp = SimpleNamespace(
        Manager=manager, get_context=processes.get_context, Condition=getattr(processes, "Condition", None)
    )


def _add_migration() -> None:
    import lmdeploy.pytorch.engine.engine as engines
    import lmdeploy.pytorch.engine.engine_loop as loops
    from lmdeploy.cli.utils import ArgumentHelper
    from lmdeploy.pytorch.disagg.config import MigrationBackend
    from lmdeploy.pytorch.paging.scheduler import Scheduler

    _add_member(MigrationBackend)
    add = ArgumentHelper.migration_backend

    def migration_backend(parser: Any) -> Any:
        action = add(parser)
        action.choices = [*action.choices, OPTION]
        return action

    ArgumentHelper.migration_backend = staticmethod(migration_backend)
    connection = engines.EngineP2PConnection

    def connect(engine: Any) -> Any:
        config = engine.engine_config
        chosen = config.migration_backend.name == OPTION and config.role.name != "Hybrid"
        return _connection()(engine) if chosen else connection(engine)

    engines.EngineP2PConnection = connect
    loop = loops.EngineLoop
    loop._make_infer_outputs = _offering(loop._make_infer_outputs)
    loop._migration_loop_process_ready = _loading(loop._migration_loop_process_ready)
    engines.Engine._on_end_session = _ending(engines.Engine._on_end_session)
    engines.Engine.end_session = _dropping(engines.Engine.end_session)
    engines.Engine._loop_finally = _closing(engines.Engine._loop_finally)
    Scheduler.end_session = _leaving(Scheduler.end_session)
    Scheduler.stop_session = _leaving(Scheduler.stop_session)
    _answer_with_the_number()


def _tell_routers() -> None:
    """What this engine says of itself has its migration backend in it; LMDeploy's router does not mind."""
    endpoints = import_module("lmdeploy.serve.openai.endpoints.distserve")
    name = "DistServeEngineConfig"
    told: Any = getattr(endpoints, name)

    class Told(told):
        migration_backend: str = OPTION

    setattr(endpoints, name, Told)


def _add_member(kind: Any) -> None:
    """One more member of an enumeration, by the same name in every process, so that it survives pickling."""
    if OPTION in kind.__members__:
        return
    member = object.__new__(kind)
    member._name_, member._value_ = OPTION, OPTION
    member._sort_order_, member.__objclass__ = len(kind._member_names_), kind
    kind._member_map_[OPTION] = member
    kind._value2member_map_[OPTION] = member
    kind._member_names_.append(OPTION)


@functools.cache
def _connection() -> Any:
    from lmdeploy.pytorch.disagg.conn.engine_conn import EngineP2PConnection
    from lmdeploy.pytorch.disagg.conn.protocol import (
        DistServeConnectionResponse,
        DistServeConnectionStatus,
        DistServeEngineEndpointInfo,
        DistServeInitResponse,
        DistServeKVTransferEndpointInfo,
    )

    from lmdeploy_deeplink.migration.exchange import Exchange

    class Connection(EngineP2PConnection):
        """Two engines of ours exchange contracts by way of LMDeploy's router, and nothing else: no socket is opened.

        `offered` are the sessions whose cache is offered, with the number of the handoff.
        """

        def __init__(self, engine: Any) -> None:
            super().__init__(engine)
            self.exchange = Exchange(engine, engine.model_path)
            self.offered: dict[int, int] = {}
            self.tasks: set[asyncio.Task[None]] = set()
            engine.scheduler.deeplink = self.exchange
            if engine.engine_config.role.name == "Prefill":
                # LMDeploy computes the first piece of a longer prompt over and over, and answers nobody any more.
                engine.max_session_len = min(engine.max_session_len, engine.engine_config.max_prefill_token_num)

        def p2p_initialize(self, init_request: Any) -> Any:
            described = DistServeKVTransferEndpointInfo(
                protocol=init_request.protocol, endpoint_info=self.exchange.describe()
            )
            return DistServeInitResponse(
                engine_endpoint_info=DistServeEngineEndpointInfo(zmq_address=""),
                kvtransfer_endpoint_info=[described],
                status=DistServeConnectionStatus.SUCCESS,
            )

        def p2p_connect(self, conn_request: Any) -> Any:
            for described in conn_request.remote_kvtransfer_endpoint_info:
                self.exchange.connect(conn_request.remote_engine_id, described.endpoint_info)
            return DistServeConnectionResponse(status=DistServeConnectionStatus.SUCCESS)

        def p2p_drop_connect(self, drop_conn_request: Any) -> Any:
            self.exchange.forget(drop_conn_request.remote_engine_id)
            return {"success": True}

    return Connection


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
            number = connection.offered.pop(session, None)
            if number is None or connection.exchange.settled(number):
                self.end_session(session)
            else:
                task = asyncio.get_running_loop().create_task(when_staged(self, connection, session, number))
                connection.tasks.add(task)
                task.add_done_callback(connection.tasks.discard)
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
        table = loop.scheduler.get_block_tables([sequence])[0].tolist()
        try:
            await connection.exchange.load(
                session,
                asked.remote_engine_id,
                asked.remote_block_ids,
                sequence.all_ids.tolist(),
                _extra(sequence),
                table,
            )
        except DeeplinkError as exc:
            log.warning("deeplink handoff for session %s failed: %s (%s)", session, exc, exc.code)
            if loop.scheduler.get_session(session) is not None:
                text = str(exc)
                response_reqs(loop.req_manager, sequence.resp, ResponseType.INTERNAL_ENGINE_ERROR, err_msg=text)
            return
        # Whoever asked may have left in the meantime.
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
                continue
            task = asyncio.get_running_loop().create_task(load(self, connection, sequence))
            connection.tasks.add(task)
            task.add_done_callback(connection.tasks.discard)

    return processed


def _leaving(end: Callable[..., Any]) -> Callable[..., Any]:
    """Decode: before a session's blocks may go to others, nothing writes to them any more."""

    @functools.wraps(end)
    def ended(self: Any, session_id: int) -> Any:
        exchange = getattr(self, "deeplink", None)
        if exchange is not None:
            exchange.leave(session_id)
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


def _answer_with_the_number() -> None:
    """LMDeploy's router keeps the sessions it has shelved by the ids of answers, as integers, and no two alike."""
    # By their names: `lmdeploy.serve` is a function of LMDeploy's as well as a package.
    chats = import_module("lmdeploy.serve.openai.chat_completions.serving")
    completions = import_module("lmdeploy.serve.openai.endpoints.completions")

    class Answer(dict):  # type: ignore[type-arg]
        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            if key == "cache_block_ids" and value and len(value) == 1:
                super().__setitem__("id", str(value[0]))

    def numbered(kind: Any) -> Any:
        class Numbered(kind):
            def model_dump(self, *args: Any, **keywords: Any) -> Any:
                return Answer(super().model_dump(*args, **keywords))

        Numbered.__name__, Numbered.__qualname__ = kind.__name__, kind.__qualname__
        return Numbered

    for module, name in ((chats, "ChatCompletionResponse"), (completions, "CompletionResponse")):
        setattr(module, name, numbered(getattr(module, name)))
