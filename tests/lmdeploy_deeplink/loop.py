"""A program for LMDeploy's Python: its own scheduler, loop and sessions, with nothing that computes. Prints
{"handed": whether every byte came, "token": the first that the decode engine tells, "early": whether anything landed
 before the forwards that had been sent were over, "late": whether all did then, "left": whether anything landed for
 whom had left, "tickets": [answer to a request with a ticket, and how it goes on, for more tokens and for one],
 "forged": whether one with a ticket that nobody minted has failed, "held": free blocks at first and last of each side,
 "closed": whether either hands nothing over any more once LMDeploy loads other weights}.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from lmdeploy_deeplink import engine

engine.install()
sys.path.append(str(Path(__file__).parents[1] / "kvconnector"))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from lmdeploy.pytorch.config import CacheConfig, SchedulerConfig  # noqa: E402
from lmdeploy.pytorch.disagg.config import EngineRole, MigrationBackend  # noqa: E402
from lmdeploy.pytorch.disagg.conn import protocol  # noqa: E402
from lmdeploy.pytorch.engine import engine as engines  # noqa: E402
from lmdeploy.pytorch.engine.engine_loop import EngineLoop, RunableEventAsync  # noqa: E402
from lmdeploy.pytorch.engine.model_agent import BatchedOutputs  # noqa: E402
from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent  # noqa: E402
from lmdeploy.pytorch.engine.request import Request, RequestManager, RequestType, Response, ResponseType  # noqa: E402
from lmdeploy.pytorch.messages import SamplingParam, SequenceMeta  # noqa: E402
from lmdeploy.pytorch.paging.scheduler import Scheduler  # noqa: E402
from lmdeploy.pytorch.strategies.ar.sequence import ARSequenceStrategy  # noqa: E402
from world import Shape, read  # noqa: E402

from deeplink import secret  # noqa: E402
from deeplink.kvconnector.contracts.contract import CacheGroup, Contract, Model, Rank  # noqa: E402
from deeplink.kvconnector.contracts.negotiate import Agreement, negotiate  # noqa: E402
from deeplink.kvconnector.handoffs import ticket as tickets  # noqa: E402
from lmdeploy_deeplink.migration import adapter, passage  # noqa: E402

LAYOUT = "block (k: token head dim | v: token head dim)"
BLOCKS, TOKEN = 24, 7
PROMPT = list(range(10, 60))
PEER = "http://prefill"
SECONDS = 10.0
_sessions = itertools.count(1)


class Agent:
    """What LMDeploy's model agent has that is counted."""

    _pre_in_que = _in_que = None

    def set_forward_inputs(self, inputs: Any) -> None: ...

    async def _async_step(self) -> None: ...

    def _drain_queues(self) -> None: ...


class Side:
    """An engine without a model: what it would compute is said by whoever drives it."""

    def __init__(self, role: str, block_size: int) -> None:
        spec = CacheGroup("full", (0, 1, 2), 2, 32, "bfloat16", block_size, LAYOUT)
        (self.group,) = Shape((spec,), blocks=BLOCKS).hold(
            Rank(0, 0, 0, ((0, 2),), (0, 3), "", {}), 1 if role == "Prefill" else 2
        )
        made = self.engine = object.__new__(engines.Engine)
        made.role, made.side = role.lower(), self
        made.cache_config = CacheConfig(8, block_size, 0, BLOCKS)
        made.engine_config = SimpleNamespace(
            role=EngineRole[role],
            migration_backend=MigrationBackend["deeplink"],
            max_prefill_token_num=256,
            tp=1,
            language_model_only=False,
        )
        strategy = ARSequenceStrategy()
        made.scheduler = Scheduler(
            SchedulerConfig(8, 512), made.cache_config, seq_meta=SequenceMeta(block_size, strategy=strategy)
        )
        made.executor = SimpleNamespace(model_agent=Agent(), model_config=None)
        made.max_session_len, made.model_path, made.input_processor = 500, "model", None
        made._multimodal_session_trim_count = made._multimodal_session_end_count = 0
        made.req_manager, made.migration_event = RequestManager(), asyncio.Event()
        made.engine_conn = engines.EngineP2PConnection(made)
        loop = self.loop = object.__new__(EngineLoop)
        loop.scheduler, loop.engine_conn, loop.req_manager = made.scheduler, made.engine_conn, made.req_manager
        loop.resp_queue, loop.seq_strategy = asyncio.Queue(), strategy
        loop.config = SimpleNamespace(num_speculative_tokens=None, enable_metrics=False)
        loop.has_runable_event = RunableEventAsync(made.scheduler)

    @property
    def free(self) -> int:
        return int(self.engine.scheduler.block_manager.get_num_free_gpu_blocks())

    def clear(self) -> None:
        for layer in self.group.values.layers:
            layer[:] = 0

    def ask(self, tokens: int, **options: Any) -> tuple[int, Any]:
        session, answer = next(_sessions), self._response()
        self.engine._on_add_session([self._request(RequestType.ADD_SESSION, session, response=False)])
        fields = {"adapter_name": None, "input_multimodals": None, "migration_request": None, **options}
        sampling = SamplingParam(max_new_tokens=tokens)
        request = self._request(
            RequestType.ADD_MESSAGE, session, token_ids=list(PROMPT), sampling_param=sampling, **fields
        )
        request.resp = answer
        self.engine._on_add_message([request])
        return session, answer

    def end(self, session: int, how: str = "end") -> None:
        kind = {"end": RequestType.END_SESSION, "stop": RequestType.STOP_SESSION}[how]
        getattr(self.engine, f"_on_{how}_session")([self._request(kind, session)])

    def table(self, session: int) -> list[int]:
        (sequence,) = self.engine.scheduler.get_session(session).sequences.values()
        found: list[int] = self.engine.scheduler.get_block_tables([sequence])[0].tolist()
        return found

    def computed(self) -> None:
        """The prompts that are waiting have been computed."""
        scheduler = self.engine.scheduler
        running = scheduler.schedule(True).running
        scheduler.activate_seqs(running)
        count = len(running)
        told = BatchedOutputs(
            next_token_ids=torch.tensor([TOKEN] * count),
            stopped=torch.ones(count, dtype=torch.bool),
            stop_pos=torch.zeros(count, dtype=torch.long),
            logits=None,
            model_metas=None,
            logprobs=None,
        )
        told.new_token_timestamp = time.time()
        inputs = SimpleNamespace(
            is_decoding=False,
            logits_indices=None,
            is_chunk=False,
            is_last_chunk=False,
            seq_length=torch.tensor([one.num_token_ids for one in running]),
        )
        outputs = self.loop._make_infer_outputs(told, running=running, model_inputs=inputs, delta=None)
        self.loop._send_resps(list(outputs.values()))

    async def migrate(self) -> None:
        await self.loop._migration_loop_process_ready(self.engine.scheduler.schedule_migration())

    async def heard(self, answer: Any) -> bool:
        """Whether there is an answer, in time."""
        end = time.monotonic() + SECONDS
        while not answer.event.is_set() and time.monotonic() < end:
            while not self.loop.resp_queue.empty():
                self.loop._send_resps(list(self.loop.resp_queue.get_nowait().values()))
            await asyncio.sleep(0.01)
        return bool(answer.event.is_set())

    def kv(self, table: list[int]) -> Any:
        return read((self.group,), 0, table, 0, len(PROMPT))

    def _request(self, kind: Any, session: int, **data: Any) -> Any:
        return Request(kind, 0, {"session_id": session, **data}, self._response())

    def _response(self) -> Any:
        return Response(ResponseType.INTERNAL_ENGINE_ERROR, 0, asyncio.Event(), None, None)


class Stated(NamedTuple):
    role: str

    def contract(
        self, group: Any, place: Any, epoch: str, channel: str, transports: Any, casts: tuple[str, ...]
    ) -> Contract:
        rank = Rank(0, 0, 0, (group.heads,), (0, 3), channel, transports)
        model = Model("LlamaForCausalLM", 3, 100, "{}", "none", "w")
        return Contract("lmdeploy", "0", "cpu", self.role, epoch, model, (group.spec,), (rank,), casts)


def without_engines() -> None:
    """What `adapter` reads of an engine is what the side has."""
    adapter.check_supported = lambda _: None
    adapter.read_group = lambda made, _: made.side.group
    adapter.read_model = lambda *_: None
    adapter.stated = lambda made, _: Stated(made.role)


def connect(prefill: Side, decode: Side) -> None:
    tcp = protocol.MigrationProtocol.TCP
    asked = SimpleNamespace(protocol=tcp)
    told = prefill.engine.p2p_initialize(asked).kvtransfer_endpoint_info
    decode.engine.p2p_connect(SimpleNamespace(remote_engine_id=PEER, remote_kvtransfer_endpoint_info=told))


def ticket(prefill: Side, decode: Side) -> str:
    """As deeplink's router makes it."""
    ours, theirs = (side.engine.engine_conn.exchange._part.contract for side in (prefill, decode))
    agreement = negotiate(ours, theirs)
    assert isinstance(agreement, Agreement), agreement
    return tickets.mint(tickets.issue(tickets.new_handoff(), ours, theirs, agreement, 30_000), secret.load())


def carried(side: str, text: str) -> Any:
    """What LMDeploy's server hands its engine for a request with a ticket."""
    fields = json.loads(passage.rewrite(json.dumps(request_params(side, text)).encode()) or b"{}")
    return protocol.MigrationRequest.model_validate(fields["migration_request"])


def request_params(side: str, text: str) -> dict[str, Any]:
    return {"kv_transfer_params": {"deeplink": {"side": side, "ticket": text}}}


def prefilled(prefill: Side) -> tuple[Any, Any]:
    """A migration request for the decode engine, and the bytes that are to come."""
    session, answer = prefill.ask(1, with_cache=True, preserve_cache=True)
    prefill.computed()
    expected = prefill.kv(prefill.table(session)).copy()
    prefill.end(session)
    request = protocol.MigrationRequest(
        protocol=protocol.MigrationProtocol.TCP,
        remote_engine_id=PEER,
        remote_session_id=0,
        remote_token_id=TOKEN,
        remote_block_ids=answer.data["cache_block_ids"],
    )
    return request, expected


async def drive() -> dict[str, Any]:
    without_engines()
    prefill, decode = Side("Prefill", 16), Side("Decode", 64)
    first = [prefill.free, decode.free]
    connect(prefill, decode)
    forwards = decode.engine.engine_conn.forwards

    request, expected = prefilled(prefill)
    session, answer = decode.ask(8, migration_request=request)
    await decode.migrate()
    assert await decode.heard(answer)
    found: dict[str, Any] = {"token": answer.data["token_ids"].tolist()}
    found["handed"] = bool(np.array_equal(decode.kv(decode.table(session)), expected))
    decode.end(session)

    # A forward was sent, and runs only later.
    decode.clear()
    request, expected = prefilled(prefill)
    forwards.send()
    session, answer = decode.ask(8, migration_request=request)
    await decode.migrate()
    await asyncio.sleep(0.3)
    found["early"] = bool(decode.kv(decode.table(session)).any())
    forwards.end()
    assert await decode.heard(answer)
    found["late"] = bool(np.array_equal(decode.kv(decode.table(session)), expected))
    decode.end(session)

    # Who waits leaves, and another may have the blocks.
    found["left"] = False
    for how in ("end", "stop"):
        decode.clear()
        request, _ = prefilled(prefill)
        forwards.send()
        session, _ = decode.ask(8, migration_request=request)
        await decode.migrate()
        await asyncio.sleep(0.05)
        table = decode.table(session)
        decode.end(session, how)
        forwards.end()
        await asyncio.sleep(0.3)
        found["left"] = found["left"] or bool(decode.kv(table).any())
        if how == "stop":
            decode.end(session)
    for tokens in (8, 1):
        text = ticket(prefill, decode)
        session, answer = prefill.ask(1, migration_request=carried("produce", text))
        prefill.computed()
        assert answer.data["cache_block_ids"] is None
        prefill.end(session)
        session, answer = decode.ask(tokens, migration_request=carried("consume", text))
        await decode.migrate()
        assert await decode.heard(answer)
        found.setdefault("tickets", []).append([answer.data["token_ids"].tolist(), answer.type.name])
        decode.end(session)
    session, answer = decode.ask(8, migration_request=carried("consume", "x"))
    found["forged"] = answer.type == ResponseType.INTERNAL_ENGINE_ERROR and answer.event.is_set()
    decode.end(session)
    # It has ended, and its cache is not staged yet, when it is stopped.
    exchange = prefill.engine.engine_conn.exchange
    settled, exchange.settled = exchange.settled, lambda _: False
    session, _ = prefill.ask(1, with_cache=True, preserve_cache=True)
    prefill.computed()
    for how in ("end", "stop"):
        prefill.end(session, how)
    exchange.settled = settled
    await asyncio.sleep(0.1)
    found["held"] = [first, [prefill.free, decode.free]]
    try:
        BaseModelAgent.update_params(None, None)
    except AttributeError:  # LMDeploy's own, after ours, of an agent that is none
        found["closed"] = [
            one.engine.engine_conn.exchange._part.endpoint._listener._closed for one in (prefill, decode)
        ]
    return found


if __name__ == "__main__":
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write("[kv]\nforeign_seconds = 30\n")
        config.flush()
        os.environ["DEEPLINK_CONFIG"] = config.name
        print(json.dumps(asyncio.run(drive())))
