"""What an engine call tells of its failure."""

from __future__ import annotations

import asyncio

import pytest

from deeplink.router.upstream import Lost, NotSent, Upstream

from .fake_engine import FakeEngine, answers, cut_short, dies, make_contract, running
from .rig import check


def test_nothing_was_sent_or_it_was_lost() -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"), answers(200, b"x" * 100))
        upstream = Upstream()
        try:
            async with running(engine):
                url = f"{engine.url}/v1/completions"
                reply = await upstream.post(url, b"{}", [("Content-Type", "a/b")])
                assert (reply.status, reply.framed, await reply.read(100)) == (200, True, b"x" * 100)
                reply = await upstream.post(url, b"{}", [])
                with pytest.raises(Lost, match="more than 99 bytes"):
                    await reply.read(99)
                engine.answer = dies
                with pytest.raises(Lost, match="closed before an answer") as lost:
                    await upstream.post(url, b"{}", [])
                assert not isinstance(lost.value, NotSent)
                engine.answer = cut_short
                reply = await upstream.post(url, b"{}", [])
                with pytest.raises(Lost, match="in the middle"):
                    await reply.read(1000)
                reply.close()
            with pytest.raises(NotSent, match="cannot connect"):
                await upstream.post(url, b"{}", [])
        finally:
            await upstream.close()

    check(test)


def test_a_closed_reply_says_why() -> None:
    async def test() -> None:
        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab")
            await reader.read()
            writer.close()

        server = await asyncio.start_server(slow, "127.0.0.1", 0)
        upstream = Upstream()
        try:
            async with server:
                port = server.sockets[0].getsockname()[1]
                reply = await upstream.post(f"http://127.0.0.1:{port}/", b"{}", [])
                assert await reply.chunk() == b"ab"
                asyncio.get_running_loop().call_later(0.1, reply.close, "given up")
                with pytest.raises(Lost, match="given up"):
                    await reply.chunk()
        finally:
            await upstream.close()

    check(test)
