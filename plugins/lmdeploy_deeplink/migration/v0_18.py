"""Everything of LMDeploy 0.18 that is changed in memory for ``--migration-backend deeplink``, and why.

One more `MigrationBackend`; with it an engine's connection is `Connection`, and the engine's loop and scheduler do what
`lmdeploy_deeplink.migration.loop_v0_18` says. Its server takes requests with tickets of deeplink's router, and tells
the engine where the control endpoint has to be. An answer that offers a cache has the handoff's number as its id, which
LMDeploy's router takes for a session's; what an engine says of itself names its migration backend, by which deeplink's
router knows that contracts are compared. A prefill engine refuses prompts that it would have to compute in pieces,
which LMDeploy does not get to the end of. An engine that is given other weights, or that lets its cache go to sleep,
hands nothing over any more. Where Ray's workers have the cache, they can be called (`calls_v0_18`).
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import Callable, Coroutine
from importlib import import_module
from typing import Any

from deeplink import config
from deeplink.kvconnector.contracts.weights import OTHERS_LOADED
from lmdeploy_deeplink.engine.platform import OPTION
from lmdeploy_deeplink.migration import calls_v0_18, loop_v0_18
from lmdeploy_deeplink.migration.forwards import Forwards, SpreadForwards
from lmdeploy_deeplink.migration.passage import PORT, Passage
from lmdeploy_deeplink.migration.requests import Admitted

ASLEEP = (
    "this engine lets its cache go to sleep, and has another when it wakes up; it hands nothing over any more until it "
    "is started again"
)
ENDED_BY = {
    **dict.fromkeys(("update_params", "update_weights_from_ipc", "update_weights_from_distributed"), OTHERS_LOADED),
    "sleep": ASLEEP,
}
"""Methods of LMDeploy's executors and model agents after which what a contract states is wrong."""


def install() -> None:
    """For one process, once, before LMDeploy is used."""
    from lmdeploy.pytorch.disagg.config import MigrationBackend

    _add_member(MigrationBackend)
    _add_option()
    _connect()
    loop_v0_18.install()
    calls_v0_18.install()
    _answer_with_the_number()
    _end_with_the_cache()


def _add_option() -> None:
    from lmdeploy.cli.cli import CLI
    from lmdeploy.cli.utils import ArgumentHelper

    add = ArgumentHelper.migration_backend

    def migration_backend(parser: Any) -> Any:
        action = add(parser)
        action.choices = [*action.choices, OPTION]
        return action

    ArgumentHelper.migration_backend = staticmethod(migration_backend)
    parse = CLI.parser.parse_args

    def parse_args(*args: Any, **keywords: Any) -> Any:
        words = parse(*args, **keywords)
        if getattr(words, "migration_backend", None) == OPTION:
            _tell_routers()
            _take_tickets()
            # For the engine's process, which does not know its server's.
            os.environ.setdefault(PORT, str(config.control_port(words.server_port)))
        return words

    CLI.parser.parse_args = parse_args


def _connect() -> None:
    import lmdeploy.pytorch.engine.engine as engines

    connection = engines.EngineP2PConnection

    def connect(engine: Any) -> Any:
        config = engine.engine_config
        chosen = config.migration_backend.name == OPTION and config.role.name != "Hybrid"
        return _connection()(engine) if chosen else connection(engine)

    engines.EngineP2PConnection = connect


def _tell_routers() -> None:
    """What this engine says of itself has its migration backend in it; LMDeploy's router does not mind."""
    endpoints = import_module("lmdeploy.serve.openai.endpoints.distserve")
    name = "DistServeEngineConfig"
    told: Any = getattr(endpoints, name)

    class Told(told):
        migration_backend: str = OPTION

    setattr(endpoints, name, Told)


def _take_tickets() -> None:
    servers = import_module("lmdeploy.serve.openai.api_server")
    name = "FastAPI"
    make: Any = getattr(servers, name)

    def made(*args: Any, **keywords: Any) -> Any:
        app = make(*args, **keywords)
        app.add_middleware(Passage)
        return app

    setattr(servers, name, made)


def _end_with_the_cache() -> None:
    agent: Any = import_module("lmdeploy.pytorch.engine.model_agent.agent").BaseModelAgent

    def end(why: str) -> None:
        # Imported by then where it is in use, and nothing to tell where it is not.
        if (part := sys.modules.get("lmdeploy_deeplink.migration.part")) is not None:
            part.end_all(why)

    _announce(agent, end)


def _announce(owner: Any, end: Callable[[str], None]) -> None:
    """Have these methods of `owner` call `end` with why before they do anything."""

    def announced(method: Callable[..., Any], why: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def called(*arguments: Any, **keywords: Any) -> Any:
            end(why)
            return method(*arguments, **keywords)

        return called

    for name, why in ENDED_BY.items():
        setattr(owner, name, announced(getattr(owner, name), why))


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

        `tickets` are those of sessions that have not come to theirs yet; `offered` are the sessions whose cache is
        offered, with the handoff's name. `forwards` are those of this engine.
        """

        def __init__(self, engine: Any) -> None:
            super().__init__(engine)
            self.forwards: Forwards | SpreadForwards
            if engine.engine_config.tp == 1:
                self.exchange = Exchange(engine, engine.model_path)
                self.forwards = Forwards()
                loop_v0_18.count(engine.executor.model_agent, self.forwards)
            else:
                workers = calls_v0_18.Calls(engine.executor)
                self.forwards = SpreadForwards(workers)
                loop_v0_18.count_sent(engine.executor, self.forwards)
                self.exchange = Exchange(engine, engine.model_path, functools.partial(calls_v0_18.spread, engine))
                _announce(engine.executor, self.exchange.end)
            self.tickets: dict[int, Admitted] = {}
            self.offered: dict[int, str] = {}
            self.tasks: set[asyncio.Task[None]] = set()
            engine.scheduler.deeplink = self
            if engine.engine_config.role.name == "Prefill":
                # LMDeploy computes the first piece of a longer prompt over and over, and answers nobody any more.
                engine.max_session_len = min(engine.max_session_len, engine.engine_config.max_prefill_token_num)

        def start(self, work: Coroutine[Any, Any, None]) -> None:
            """Let it run beside the engine's loop."""
            task = asyncio.get_running_loop().create_task(work)
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

        def leave(self, session: int) -> None:
            """The session's blocks are about to be freed: when this returns, they are neither read nor written."""
            self.exchange.leave(session)
            name = self.offered.pop(session, None)
            if name is not None and not self.exchange.settled(name):
                self.exchange.drop(name)
            admitted = self.tickets.pop(session, None)
            if admitted is not None:
                self.exchange.abandon(admitted.ticket)

        def p2p_initialize(self, init_request: Any) -> Any:
            described = DistServeKVTransferEndpointInfo(
                protocol=init_request.protocol, endpoint_info=self.exchange.foreign.describe()
            )
            return DistServeInitResponse(
                engine_endpoint_info=DistServeEngineEndpointInfo(zmq_address=""),
                kvtransfer_endpoint_info=[described],
                status=DistServeConnectionStatus.SUCCESS,
            )

        def p2p_connect(self, conn_request: Any) -> Any:
            for described in conn_request.remote_kvtransfer_endpoint_info:
                self.exchange.foreign.connect(conn_request.remote_engine_id, described.endpoint_info)
            return DistServeConnectionResponse(status=DistServeConnectionStatus.SUCCESS)

        def p2p_drop_connect(self, drop_conn_request: Any) -> Any:
            self.exchange.foreign.forget(drop_conn_request.remote_engine_id)
            return {"success": True}

    return Connection


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
