"""An engine's cache events as vLLM and SGLang publish them: PUB and ROUTER, numbered, with a buffer for replay."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import msgspec
import zmq.asyncio

END = (-1).to_bytes(8, "big", signed=True)


def stored(
    hashes: list[Any], tokens: list[int], parent: Any = None, size: int = 4, *, array: bool = False, **more: Any
) -> Any:
    if array:
        return ["BlockStored", hashes, parent, tokens, size, more.get("lora_id"), more.get("medium", "GPU")]
    base = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return base | more


def removed(hashes: list[Any], *, array: bool = False, **more: Any) -> Any:
    if array:
        return ["BlockRemoved", hashes, more.get("medium", "GPU")]
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"} | more


def cleared(*, array: bool = False) -> Any:
    return ["AllBlocksCleared"] if array else {"type": "AllBlocksCleared"}


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


class Publisher:
    """Use as an async context manager. `silent` publishes without sending: the number is used up all the same."""

    def __init__(self, buffer: int = 100) -> None:
        self.context = zmq.asyncio.Context()
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self.number = 0
        self.events = self.replay = ""
        self.asked: list[int] = []

    async def __aenter__(self) -> Publisher:
        self._pub, self._router = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        port = self._pub.bind_to_random_port(self.events.rpartition(":")[0] or "tcp://127.0.0.1")
        self.events = f"tcp://127.0.0.1:{port}"
        self.replay = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._task = asyncio.create_task(self._serve())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        self.context.destroy(linger=0)

    async def publish(self, *events: Any, silent: bool = False, raw: bytes = b"") -> None:
        data = raw or batch(*events)
        self.buffer.append((self.number, data))
        if not silent:
            await self._pub.send_multipart([b"topic", self.number.to_bytes(8, "big"), data])
        self.number += 1

    def restart(self) -> None:
        self.number = 0
        self.buffer.clear()

    async def _serve(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            for number, data in list(self.buffer):
                if number >= first:
                    await self._router.send_multipart([client, b"", b"topic", number.to_bytes(8, "big"), data])
            await self._router.send_multipart([client, b"", b"", END, b""])
