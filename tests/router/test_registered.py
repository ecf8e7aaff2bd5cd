"""Engines that register themselves."""

from __future__ import annotations

import json
from typing import Any

from deeplink import secret as shared

from .fake_engine import SECRET, FakeEngine, make_contract, running
from .rig import Rig, check, router, until

TOKEN = shared.control_token(SECRET)
ASK = {"prompt": "x"}


async def beat(route: Rig, engine: FakeEngine, *, token: str = TOKEN, **more: Any) -> tuple[int, Any]:
    body = {"url": engine.url, "control": engine.control, "epoch": engine.contract.epoch} | more
    url = f"{route.url}/deeplink/v1/registrations/{engine.name}"
    async with route.client.put(url, json=body, headers={"Authorization": f"Bearer {token}"}) as response:
        return response.status, json.loads(await response.read())


def test_an_engine_is_there_while_it_says_so() -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with running(engine), router(poll=60.0) as route:
            assert (await route.complete(ASK)).status == 503
            assert await beat(route, engine, seconds=0.5) == (200, {"name": "e", "seconds": 0.5})
            assert (await route.complete(ASK)).status == 200
            # A restart is seen by the epoch, long before the next look.
            engine.restart()
            before = engine.polls
            await beat(route, engine, seconds=0.5)
            assert engine.polls == before + 1
            await beat(route, engine, seconds=0.5)
            assert engine.polls == before + 1

            async def gone() -> bool:
                return (await route.complete(ASK)).status == 503

            while not await gone():
                pass
            await beat(route, engine)
            assert (await route.complete(ASK)).status == 200
            url = f"{route.url}/deeplink/v1/registrations/e"
            async with route.client.delete(url, headers={"Authorization": f"Bearer {TOKEN}"}) as response:
                assert response.status == 204
            assert await gone()

    check(test)


def test_only_who_knows_the_secret_registers() -> None:
    async def test() -> None:
        engine = FakeEngine("e", make_contract("both"))
        async with running(engine), router() as route:
            for token in ("", "wrong", SECRET.decode()):
                assert (await beat(route, engine, token=token))[0] == 401
            assert (await route.complete(ASK)).status == 503
            for wrong in ({"epoch": ""}, {"seconds": 0}, {"url": "x"}, {"name": "other"}, {"more": 1}):
                assert (await beat(route, engine, **wrong))[0] == 400

    check(test)


def test_a_name_from_the_file_is_not_to_be_had() -> None:
    async def test() -> None:
        engine, other = FakeEngine("e", make_contract("both")), FakeEngine("e", make_contract("both"))
        async with running(engine, other), router(engine) as route:
            status, answer = await beat(route, other, seconds=0.1)
            assert (status, answer["error"]["field"]) == (400, "name")
            assert (await route.complete(ASK)).status == 200
            await until(lambda: engine.calls)

    check(test)
