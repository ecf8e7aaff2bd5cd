"""What a router can do it can with several workers, whichever of them a client has."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from deeplink import secret
from deeplink.kvconnector.handoffs.handoff import BEGUN, NOT_BEGUN

from .certificates import make_certificate
from .fake_engine import SECRET, FakeEngine, make_contract, running
from .fake_kinds import Cache, Kin
from .rig import until
from .worker_rig import MARKS, Running, check, settings, workers

pytestmark = MARKS
TEXT = "the beginning of a prompt"


def four() -> list[FakeEngine]:
    names = (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode"))
    return [FakeEngine(name, make_contract(role)) for name, role in names]


async def eventually(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """As `until`, of something that has to be waited for itself."""

    async def asked() -> None:
        while not await condition():
            await asyncio.sleep(0.05)

    await asyncio.wait_for(asked(), seconds)


@contextmanager
def asking(route: Running) -> Iterator[list[int]]:
    """Requests, one after the other, while the context lasts; gives their statuses."""
    statuses: list[int] = []

    async def work() -> None:
        while True:
            statuses.append((await route.ask())[0])

    tasks = [asyncio.create_task(work()) for _ in range(4)]
    try:
        yield statuses
    finally:
        for task in tasks:
            task.cancel()


def test_decode_is_asked_early(tmp_path: Path) -> None:
    """The worker that serves it waits for the prefill engine's word; if it is killed then, the handoff ends."""

    async def test() -> None:
        producer = FakeEngine("p", make_contract("prefill", channel="10.0.0.1:41"), delay=5, stages=asyncio.Queue())
        consumer = FakeEngine("d", make_contract("decode"), early=True)
        assert producer.stages is not None
        async with running(producer, consumer), workers(tmp_path, producer, consumer, dispatch="auto") as route:
            await route.complete()
            for count, worker in enumerate(route.workers, 1):
                async with route.only(worker):
                    task = asyncio.create_task(route.ask())
                    await until(lambda count=count: len(producer.watched) == 2 * count - 1)
                    assert len(consumer.calls) == count - 1
                    producer.stages.put_nowait(NOT_BEGUN)
                    await until(lambda count=count: len(producer.watched) == 2 * count)
                    producer.stages.put_nowait(BEGUN)
                    status, data, path = await task
                assert (status, path) == (200, "handoff"), data
                assert consumer.calls[-1].part["early"] is True
                assert consumer.calls[-1].ticket.handoff == producer.watched[-1]
            await route.idle()
            producer.deleted.clear()
            async with route.only(route.workers[0]):
                task = asyncio.create_task(route.ask())
                await until(lambda: len(producer.watched) == 5)
                os.kill(route.workers[0], signal.SIGKILL)
                with contextlib.suppress(aiohttp.ClientError):
                    await task
            await until(lambda: producer.watched[-1] in producer.deleted)
            assert len(consumer.calls) == 2
            await until(lambda: producer.calls[-1].cancelled)
            await route.idle()

    check(test)


def test_requests_go_where_their_beginning_is(tmp_path: Path) -> None:
    """What engines say they hold is the owner's to know; a prompt's tokens each worker asks for itself."""
    pytest.importorskip("zmq")
    from .kv_publisher import Publisher, removed, stored

    async def tokenize(request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"tokens": [ord(letter) for letter in body["prompt"]]})

    async def test() -> None:
        async with Publisher() as one, Publisher() as other:
            engines = []
            for name, publisher in (("a", one), ("b", other)):
                engine = FakeEngine(name, make_contract("both"), kind="plain", others={"/tokenize": tokenize})
                engine.declared = {"events": publisher.events, "replay": publisher.replay}
                engines.append(engine)
            await one.publish(stored([7], [99] * 4))
            await other.publish(stored([1, 2], [ord(letter) for letter in TEXT[:8]]))

            def served() -> list[int]:
                return [sum(call.path == "/v1/completions" for call in engine.calls) for engine in engines]

            async def exact() -> bool:
                known = (await route.engines()).values()
                return all(engine["cache"]["exact"] for engine in known)

            async with running(*engines), workers(tmp_path, *engines, decode_policy="exact_prefix") as route:
                await route.complete()
                await eventually(exact)
                # Workers hear of the block sizes a moment later.
                await eventually(lambda: _served_by(route, engines, "b"))
                for engine in engines:
                    engine.calls.clear()
                for worker in route.workers:
                    async with route.only(worker):
                        for prompt in (TEXT[:8] + " and its end", [ord(letter) for letter in TEXT]):
                            for _ in range(2):
                                assert (await route.ask(prompt=prompt))[0] == 200
                assert served() == [0, 8]
                tokenised = [call for engine in engines for call in engine.calls if call.path == "/tokenize"]
                assert len(tokenised) == 2, "once a worker"
                # What is heard now holds for all workers at once.
                await other.publish(removed([1]), removed([2]))
                await one.publish(stored([1, 2], [ord(letter) for letter in TEXT[:8]]))
                await eventually(lambda: _served_by(route, engines, "a"))
                for engine in engines:
                    engine.calls.clear()
                for worker in route.workers:
                    async with route.only(worker):
                        assert (await route.ask(prompt=TEXT))[0] == 200
                assert served() == [2, 0]
                assert "deeplink_prefix_guesses_total 0.0" in await route.get("/metrics")
                for engine in engines:
                    engine.others.clear()
                for worker in route.workers:
                    async with route.only(worker):
                        assert (await route.ask(prompt="never seen before"))[0] == 200
                assert "deeplink_prefix_guesses_total 2.0" in await route.get("/metrics")
                await route.idle()

    check(test)


async def _served_by(route: Running, engines: list[FakeEngine], name: str) -> bool:
    """Whether it is that engine now which a request goes to, at every worker."""
    (engine,) = (engine for engine in engines if engine.name == name)
    for worker in route.workers:
        before = len(engine.calls)
        async with route.only(worker):
            assert (await route.ask(prompt=[ord(letter) for letter in TEXT]))[0] == 200
        if len(engine.calls) == before:
            return False
    return True


def test_tls_and_keys(tmp_path: Path) -> None:
    """A worker that is started again opens to the same keys as the others, whatever their file says by then; and one
    whose certificate cannot be read any more says so, and serves once it can be."""
    certificate = make_certificate(tmp_path)
    names = ["client-key-0123456789", "another-key-0123456789"]
    given, other = ({"Authorization": f"Bearer {name}"} for name in names)

    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        key, keys = Path(certificate["key"]), tmp_path / "keys"
        keys.write_text(names[0])
        async with running(engine), workers(tmp_path, engine, tls=certificate, keys_file=str(keys)) as route:
            await route.complete()

            async def each() -> None:
                for worker in route.workers:
                    async with route.only(worker):
                        assert (await route.ask(headers=given))[0] == 200
                        assert (await route.ask(headers=other))[0] == 401
                        assert "deeplink_requests_total" in await route.get("/metrics")

            await each()
            with pytest.raises(aiohttp.ClientError):
                await route.client.get(route.url.replace("https", "http") + "/health")
            keys.write_text(names[1])
            good = key.read_text()
            key.write_text("no key")
            old = set(route.workers)
            os.kill(min(old), signal.SIGKILL)
            await until(lambda: "cannot use the certificate" in route.said)
            assert (await route.ask(headers=given))[0] == 200
            key.write_text(good)
            await eventually(lambda: _stays(route, old))
            await route.complete()
            await each()
            assert not [call for call in engine.calls if "Authorization" in call.headers]

    check(test)


async def _stays(route: Running, old: set[int]) -> bool:
    """Whether there is another worker than these, and it serves."""
    found = [worker for worker in route.workers if worker not in old]
    if not found:
        return False
    await asyncio.sleep(1.0)
    return found[0] in route.workers


def test_spans_of_all_workers_are_of_the_clients_traces(tmp_path: Path) -> None:
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    found: list[Any] = []

    async def collect(request: web.Request) -> web.Response:
        said = service.ExportTraceServiceRequest.FromString(await request.read())
        found.extend(span for one in said.resource_spans for scope in one.scope_spans for span in scope.spans)
        return web.Response(body=service.ExportTraceServiceResponse().SerializeToString())

    async def test() -> None:
        app = web.Application()
        app.router.add_post("/v1/traces", collect)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        more = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{runner.addresses[0][1]}",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        engines = four()
        try:
            async with running(*engines), workers(tmp_path, *engines, more=more, tracing=True) as route:
                await route.complete()
                traces = []
                for number, worker in enumerate(route.workers):
                    traces.append(f"0af7651916cd43dd8448eb211c80319{number}")
                    async with route.only(worker):
                        headers = {"traceparent": f"00-{traces[-1]}-b7ad6b7169203331-01"}
                        assert (await route.ask(headers=headers, prompt="a secret"))[0] == 200
                assert (await route.ask(prompt="a secret"))[0] == 200
            # A worker that ends says what it has left.
            assert len(found) == 9
        finally:
            await runner.cleanup()
        for trace in traces:
            mine = {span.name.partition(" ")[0]: span for span in found if span.trace_id.hex() == trace}
            assert set(mine) == {"POST", "prefilling", "decoding"}
            assert mine["POST"].parent_span_id.hex() == "b7ad6b7169203331"
            for name in ("prefilling", "decoding"):
                assert mine[name].parent_span_id == mine["POST"].span_id
                told = f"00-{trace}-{mine[name].span_id.hex()}-01"
                calls = [call for engine in engines for call in engine.calls]
                assert sum(call.headers["traceparent"] == told for call in calls) == 1
        assert "secret" not in str(found)

    check(test)


def test_a_rolling_restart_without_an_error(tmp_path: Path) -> None:
    async def test() -> None:
        engines = four()
        async with running(*engines), workers(tmp_path, *engines) as route:
            await route.complete()
            with asking(route) as statuses:
                for engine in engines:
                    old, name = engine.contract.epoch, engine.name

                    async def empty(name: str = name) -> bool:
                        return not (await route.engines())[name]["requests"]

                    async def anew(name: str = name, old: str = old) -> bool:
                        state = (await route.engines())[name]
                        return state["up"] and state["epoch"] != old

                    assert await route.operate("POST", f"{name}/drain") == 200
                    await eventually(empty)
                    before = len(engine.calls)
                    await asyncio.sleep(0.1)
                    assert len(engine.calls) == before, "it is drained for every worker"
                    await engine.stop()
                    engine.restart()
                    await engine.start()
                    await eventually(anew)
                    assert await route.operate("DELETE", f"{name}/drain") == 200
                    await until(lambda engine=engine, before=before: len(engine.calls) > before)
            assert len(statuses) > 8
            assert set(statuses) == {200}
            await route.idle()

    check(test)


def test_the_file_is_followed_and_engines_register(tmp_path: Path) -> None:
    async def test() -> None:
        engines = [FakeEngine(name, make_contract("both")) for name in "abc"]
        a, b, c = engines
        path = tmp_path / "deeplink.toml"

        def write(*listed: FakeEngine, routes: str = "") -> None:
            draft = path.with_suffix(".new")
            draft.write_text(settings(tmp_path, *listed) + routes)
            os.replace(draft, path)

        async def only_at(*some: FakeEngine) -> bool:
            before = [len(engine.calls) for engine in engines]
            for worker in route.workers:
                async with route.only(worker):
                    for _ in range(2):
                        assert (await route.ask())[0] == 200
            gone = [len(e.calls) - count for e, count in zip(engines, before, strict=True) if e not in some]
            return not any(gone)

        async with running(*engines), workers(tmp_path, a) as route:
            await route.complete()
            with asking(route) as statuses:
                await eventually(lambda: only_at(a))
                write(b)
                await eventually(lambda: only_at(b))
                write(a, c, routes='\n[[routes]]\nprefill = ["c"]\ndecode = ["c"]\n')
                route.process.send_signal(signal.SIGHUP)
                await eventually(lambda: only_at(c))
                path.write_text("[[engines]]\nname = 1\n")
                await until(lambda: "stay as they are" in route.said)
                assert await only_at(c)
                write()
                beat = {"url": b.url, "control": b.control, "epoch": b.contract.epoch, "seconds": 15}
                token = {"Authorization": f"Bearer {secret.control_token(SECRET)}", "Connection": "close"}
                url = f"{route.url}/deeplink/v1/registrations/b"
                async with route.client.put(url, json=beat, headers=token) as got:
                    assert got.status == 200, await got.read()
            assert set(statuses) == {200}
            await until(lambda: "lists no engine" in route.said)
            assert await only_at(b)
            async with route.client.delete(f"{url}?epoch={b.contract.epoch}", headers=token) as got:
                assert got.status == 204
            for worker in route.workers:
                async with route.only(worker):
                    assert (await route.ask())[0] == 503
            await route.idle()

    check(test)


def test_engines_that_have_to_be_connected_are_so_once(tmp_path: Path) -> None:
    """Not by each worker that serves them, nor again by one that was started again: connecting them anew would break
    what is being read."""

    async def test() -> None:
        cache = Cache()
        p, d = Kin("p", "lmdeploy", cache), Kin("d", "lmdeploy", cache)
        async with running(p.engine, d.engine):
            p.open.set()
            d.open.set()
            async with workers(tmp_path, p.engine, d.engine) as route:
                await route.complete()
                await asyncio.gather(*(route.ask() for _ in range(8)))
                for _ in range(2):
                    for worker in route.workers:
                        async with route.only(worker):
                            assert (await route.ask())[::2] == (200, "handoff")
                    ending = route.workers[0]
                    os.kill(ending, signal.SIGKILL)
                    await until(lambda ending=ending: ending not in route.workers)
                    await route.complete()
                assert [peer for peer, _ in d.linked] == [p.engine.url]
                # What a killed worker had begun is the engines' own to end: they have no control endpoint to be asked.
                p.open.clear()
                task = asyncio.create_task(route.ask())
                await until(lambda: len(p.requests) > len(d.requests))
                for worker in route.workers:
                    os.kill(worker, signal.SIGKILL)
                with contextlib.suppress(aiohttp.ClientError):
                    await task
                await until(lambda: p.requests[-1].cancelled)
                p.open.set()
                await route.idle()
                assert not p.engine.deleted + d.engine.deleted
                # As in one process: what an engine says is wrong reaches the client by name.
                d.engine.others["/distserve/p2p_initialize"] = {"status": 2}
                p.engine.well = False
                await eventually(lambda: _up(route, "p", False))
                p.engine.well = True
                await eventually(lambda: _up(route, "p", True))
                status, data, _ = await route.ask()
                assert status == 502
                assert b"p2p_initialize did not connect p and d" in data
                await route.idle()
        assert not cache.wrong
        assert not cache.kept

    check(test)


async def _up(route: Running, name: str, up: bool) -> bool:
    return bool((await route.engines())[name]["up"]) is up
