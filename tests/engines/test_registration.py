"""An engine that registers itself, with a router that starts long after it."""

from __future__ import annotations

import time

from fleet import Fleet, Pair, Running

KEY = "the key of an operator"


def test_an_engine_registers_and_takes_leave(fleet: Fleet, pair: Pair, unlike: tuple[Running, Running]) -> None:
    _, engine = unlike
    name = engine.url.removeprefix("http://")
    told = engine.process.log.read_text()
    assert told.count("does not have this engine, which goes on") == 1
    router = fleet.registry_router(KEY)
    end = time.monotonic() + 20
    while not (found := fleet.registered(router, KEY).get(name, {})).get("up"):
        assert time.monotonic() < end, "it did not register in time"
        time.sleep(0.1)
    assert (found["url"], found["control"]) == (engine.url, engine.engine.control)
    assert found["epoch"] == engine.contract.epoch
    assert found["role"] == "decode"
    engine.process.stop()
    # At once, unless the process that started it was killed too; what it last said holds for 15 seconds.
    end = time.monotonic() + 20
    while fleet.registered(router, KEY):
        assert time.monotonic() < end, "it is still registered"
        time.sleep(0.1)
    assert pair.decode.control("/v1/status").status == 200
