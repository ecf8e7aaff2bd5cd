"""A program for LMDeploy's Python: two engines in this process, of unlike block sizes, and migrations between them.

migrate.py MODEL OTHER_WEIGHTS CONFIG; prints
{"alone": [[length, tokens alone, tokens by migration], …], "blocks": [free at first, free at last] of each engine,
 "sessions": how many are left of each, "long": outcome of a prompt that is too long for a prefill engine,
 "bad": [outcome of a request for what was not offered, of the next],
 "tickets": [[tokens alone, tokens by a ticket], …], "forged": outcome of a request with a ticket that nobody minted,
 "overtaken": [tokens alone, tokens by migration] into blocks that a forward sent before still writes to,
 "contracts": of the two, "load": {"right": n, "wrong": n, "failed": n, "left": n},
 "refused": the field in which other weights differ}.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import sys
from typing import Any

from lmdeploy_deeplink import engine

DEVICE = engine.install()
LENGTHS = (5, 16, 17, 63, 64, 65, 200)
TOKENS = 16
REQUESTS, AT_ONCE, LEAVING = 40, 8, 0.2
VOCABULARY = 1000
PREFILL, DECODE = "http://prefill", "http://decode"


def main(model: str, other: str, config: str) -> None:
    os.environ["DEEPLINK_CONFIG"] = config
    from lmdeploy.pytorch.disagg.config import EngineRole

    engines = make(model, EngineRole.Prefill, 16), make(model, EngineRole.Decode, 64)
    told = asyncio.run(migrations(*engines))
    told["refused"] = refused(make(other, EngineRole.Decode, 64), engines[0])
    told["contracts"] = [side.engine_conn.exchange.foreign.describe() for side in engines]
    print(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # engines that are closed in one process end each other's groups


def make(model: str, role: Any, block_size: int) -> Any:
    from lmdeploy import PytorchEngineConfig
    from lmdeploy.pytorch.disagg.config import MigrationBackend
    from lmdeploy.pytorch.engine import Engine

    config = PytorchEngineConfig(
        device_type=DEVICE,
        dtype="bfloat16",
        max_batch_size=8,
        block_size=block_size,
        session_len=512,
        num_gpu_blocks=80,
        max_prefill_token_num=256,
        eager_mode=True,
        enable_metrics=False,
        role=role,
        migration_backend=MigrationBackend["deeplink"],
    )
    return Engine.from_pretrained(model, engine_config=config)


def refused(decode: Any, prefill: Any) -> str:
    from deeplink.errors import Refused

    try:
        decode.engine_conn.exchange.foreign.connect(PREFILL, prefill.engine_conn.exchange.foreign.describe())
    except Refused as exc:
        return exc.field
    return ""


def connect(prefill: Any, decode: Any) -> None:
    """What LMDeploy's router does with two engines."""
    from lmdeploy.pytorch.disagg.config import DistServeEngineConfig
    from lmdeploy.pytorch.disagg.conn import protocol

    shape = DistServeEngineConfig(
        tp_size=1, dp_size=1, pp_size=None, ep_size=1, dp_rank=0, block_size=16, num_cpu_blocks=0, num_gpu_blocks=80
    )
    sides = ((prefill, PREFILL, DECODE), (decode, DECODE, PREFILL))
    answers = [
        side.p2p_initialize(
            protocol.DistServeInitRequest(
                protocol=protocol.MigrationProtocol.TCP,
                local_engine_id=own,
                local_engine_config=shape,
                remote_engine_id=remote,
                remote_engine_config=shape,
            )
        )
        for side, own, remote in sides
    ]
    for (side, _, remote), answer in zip(sides, reversed(answers), strict=True):
        side.p2p_connect(
            protocol.DistServeConnectionRequest(
                protocol=protocol.MigrationProtocol.TCP,
                remote_engine_id=remote,
                remote_engine_endpoint_info=answer.engine_endpoint_info,
                remote_kvtransfer_endpoint_info=answer.kvtransfer_endpoint_info,
            )
        )


class Client:
    def __init__(self, prefill: Any, decode: Any) -> None:
        self.prefill, self.decode = prefill, decode
        self._session = 0

    async def ask(self, side: Any, ids: list[int], **options: Any) -> tuple[str, list[int], list[int]]:
        """How it ended, the tokens, and the numbers that stand for its blocks."""
        from lmdeploy import GenerationConfig

        self._session += 1
        settings = GenerationConfig(top_k=1, ignore_eos=True, **options)
        tokens: list[int] = []
        numbers: list[int] = []
        status = ""
        async for out in side.create_instance().async_stream_infer(self._session, ids, gen_config=settings):
            tokens += out.token_ids
            numbers = out.cache_block_ids or numbers
            status = out.status.name
        return status, tokens, numbers

    async def alone(self, ids: list[int]) -> list[int]:
        return (await self.ask(self.decode, ids, max_new_tokens=TOKENS))[1]

    async def prefilled(self, ids: list[int]) -> Any:
        """What LMDeploy's router asks the decode engine with, once the prefill engine has answered."""
        from lmdeploy.pytorch.disagg.conn import protocol

        status, tokens, numbers = await self.ask(
            self.prefill, ids, max_new_tokens=1, with_cache=True, preserve_cache=True
        )
        assert status == "FINISH", status
        return protocol.MigrationRequest(
            protocol=protocol.MigrationProtocol.TCP,
            remote_engine_id=PREFILL,
            remote_session_id=0,
            remote_token_id=tokens[-1],
            remote_block_ids=numbers,
        )

    async def migrated(self, ids: list[int]) -> tuple[str, list[int]]:
        request = await self.prefilled(ids)
        status, tokens, _ = await self.ask(self.decode, ids, max_new_tokens=TOKENS, migration_request=request)
        return status, tokens


def prompt(length: int, seed: int = 0) -> list[int]:
    return [3 + (7919 * (place + length + seed) + length) % (VOCABULARY - 3) for place in range(length)]


async def migrations(prefill: Any, decode: Any) -> dict[str, Any]:
    connect(prefill, decode)
    client = Client(prefill, decode)
    first = [free(side) for side in (prefill, decode)]
    compared = []
    for length in LENGTHS:
        ids = prompt(length)
        status, tokens = await client.migrated(ids)
        compared.append([length, await client.alone(ids), tokens if status == "FINISH" else status])
    long = (await client.ask(prefill, prompt(300), max_new_tokens=1, with_cache=True, preserve_cache=True))[0]
    bad = await client.prefilled(prompt(40))
    bad.remote_block_ids = [1, 2, 3]
    outcomes = [(await client.ask(decode, prompt(40), max_new_tokens=4, migration_request=bad))[0]]
    outcomes.append((await client.migrated(prompt(41)))[0])
    by_ticket = [await ticketed(client, prompt(64), tokens) for tokens in (TOKENS, 1)]
    forged = (await client.ask(decode, prompt(40), max_new_tokens=4, migration_request=carried("consume", "x")))[0]
    late = await overtaken(client)
    load = await under_load(client)
    await asyncio.sleep(0.5)
    sessions = [len(side.scheduler.sessions) for side in (prefill, decode)]
    blocks = [[was, free(side)] for was, side in zip(first, (prefill, decode), strict=True)]
    told = {"alone": compared, "blocks": blocks, "sessions": sessions, "long": long, "bad": outcomes, "load": load}
    return {**told, "tickets": by_ticket, "forged": forged, "overtaken": late}


def carried(side: str, ticket: str) -> Any:
    """What LMDeploy's server hands its engine for a request with a ticket."""
    from lmdeploy.pytorch.disagg.conn import protocol

    return protocol.MigrationRequest(
        protocol=protocol.MigrationProtocol.TCP,
        remote_engine_id=f"deeplink-{side}-{ticket}",
        remote_session_id=0,
        remote_token_id=0,
        remote_block_ids=[],
    )


async def ticketed(client: Client, ids: list[int], tokens: int) -> list[list[int]]:
    """As deeplink's router has it."""
    from deeplink import secret
    from deeplink.kvconnector.contracts import contract, negotiate
    from deeplink.kvconnector.handoffs import ticket as tickets

    expected = (await client.ask(client.decode, ids, max_new_tokens=tokens))[1]
    sides = (client.prefill, client.decode)
    ours, theirs = (contract.decode(base64.b64decode(one.engine_conn.exchange.foreign.describe())) for one in sides)
    agreement = negotiate.negotiate(ours, theirs)
    assert isinstance(agreement, negotiate.Agreement), agreement
    text = tickets.mint(tickets.issue(tickets.new_handoff(), ours, theirs, agreement, 30_000), secret.load())
    status, _, numbers = await client.ask(
        client.prefill, ids, max_new_tokens=1, migration_request=carried("produce", text)
    )
    assert (status, numbers) == ("FINISH", [])
    status, found, _ = await client.ask(
        client.decode, ids, max_new_tokens=tokens, migration_request=carried("consume", text)
    )
    assert status == "FINISH", status
    return [expected, found]


async def overtaken(client: Client) -> list[list[int]]:
    """A request leaves when the forward that computes its next token has been sent to the model, which comes to it only
    after the cache of another request has had a second to land in the blocks that were its own."""
    ids = prompt(120)
    expected = await client.alone(ids)
    agent = client.decode.executor.model_agent
    forward = agent.async_forward
    begun, gate = asyncio.Event(), asyncio.Event()

    async def late(*args: Any, **options: Any) -> Any:
        begun.set()
        await asyncio.wait_for(gate.wait(), 30)
        return await forward(*args, **options)

    leaving = asyncio.create_task(client.ask(client.decode, prompt(70), max_new_tokens=40))
    while not any(one.num_new_tokens > 3 for one in sequences(client.decode)):
        await asyncio.sleep(0.001)
    agent.async_forward = late
    await asyncio.wait_for(begun.wait(), 30)
    await asyncio.sleep(0.1)  # a cancel in the very moment of a token is lost: asyncio.wait_for, before Python 3.12
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    coming = asyncio.create_task(client.migrated(ids))
    while not any(one.migration_request for one in sequences(client.decode)):
        await asyncio.sleep(0.001)
    await asyncio.sleep(1)
    gate.set()
    agent.async_forward = forward
    status, tokens = await asyncio.wait_for(coming, 60)
    assert status == "FINISH", status
    return [expected, tokens]


def sequences(side: Any) -> list[Any]:
    return [one for session in side.scheduler.get_sessions() for one in session.sequences.values()]


async def under_load(client: Client) -> dict[str, int]:
    """Requests at once, some of which leave at a random moment; the others are answered as they are alone."""
    rng = random.Random(5)
    prompts = [prompt(rng.randint(4, 160), seed) for seed in range(6)]
    expected = [await client.alone(ids) for ids in prompts]
    counts = {"right": 0, "wrong": 0, "failed": 0, "left": 0}
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(place: int, leaving: bool, after: float) -> None:
        async with gate:
            asked = asyncio.create_task(client.migrated(prompts[place]))
            if leaving:
                await asyncio.sleep(after)
                asked.cancel()
            try:
                status, tokens = await asyncio.wait_for(asked, 60)
            except asyncio.CancelledError:
                counts["left"] += 1
                return
            if status != "FINISH":
                counts["failed"] += 1
            else:
                counts["right" if tokens == expected[place] else "wrong"] += 1

    await asyncio.gather(*(one(rng.randrange(6), rng.random() < LEAVING, rng.uniform(0, 0.4)) for _ in range(REQUESTS)))
    return counts


def free(side: Any) -> int:
    blocks: int = side.scheduler.block_manager.get_num_free_gpu_blocks()
    return blocks


if __name__ == "__main__":
    main(*sys.argv[1:])
