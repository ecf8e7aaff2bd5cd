"""Placements' routes: a share of the requests of a length to each, and what happens when one cannot serve."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink import config
from deeplink.config import RouteEntry
from deeplink.errors import ConfigError, NoEngine, Overloaded
from deeplink.router.app import make_app
from deeplink.router.choice import Engine, Pair, Plain, Shut, Table, choose, table
from deeplink.router.engine import PLAIN
from deeplink.router.parts import LISTED
from deeplink.router.policy import Work
from deeplink.router.routes import Routes, place
from deeplink.router.serve import serving

from .fake_engine import SECRET, FakeEngine, make_contract, running
from .rig import check, pair, rig, until


def engine(name: str, role: str, down: str = "") -> Engine:
    return Engine(name, f"http://{name}", f"http://{name}:1", make_contract(role), down)


def engines(down: str = "") -> Table:
    named = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode", "b": "both"}
    return table(engine(name, role, "gone" if name in down.split() else "") for name, role in named.items())


def route(prefill: str, decode: str, weight: float = 1.0, up_to: int | None = None) -> RouteEntry:
    return RouteEntry(prefill=tuple(prefill.split()), decode=tuple(decode.split()), weight=weight, up_to=up_to)


def chooser(shut: dict[str, Shut] | None = None, *, handoff: bool = True) -> Callable[[Table, bool], Plain | Pair]:
    def first(work: Work, options: Sequence[Engine]) -> Engine:
        return options[0]

    def among(of: Table, sound: bool) -> Plain | Pair:
        return choose(of, handoff=handoff, pick=first, shut=shut or {})

    return among


def names(choice: Plain | Pair) -> str:
    return choice.engine.name if isinstance(choice, Plain) else f"{choice.prefill.name} {choice.decode.name}"


def served(routes: Routes, tokens: int, count: int = 100, of: Table | None = None, **more: Any) -> Counter[str]:
    everyone = of or engines()
    return Counter(names(routes.choose(everyone, tokens, chooser(**more))) for _ in range(count))


def test_without_routes_all_engines_are_for_all() -> None:
    assert served(Routes([]), 10, 3) == {"p1 d1": 3}


def test_lengths_have_their_own_engines_and_shares() -> None:
    routes = Routes([route("b", "b", 1, 100), route("p1", "d1", 3), route("p2", "d2", 1)])
    assert served(routes, 100) == {"b": 100}
    found = served(routes, 101)
    assert found.keys() == {"p1 d1", "p2 d2"}
    assert found["p1 d1"] == pytest.approx(75, abs=2)


def test_longer_than_any_route_is_for_all() -> None:
    assert served(Routes([route("p2", "d2", 1, 100)]), 1000, 2) == {"p1 d1": 2}


def test_a_route_of_engines_that_do_all_is_not_split() -> None:
    """Although others of these engines are there to prefill."""
    assert served(Routes([route("b", "b")]), 10, 2) == {"b": 2}


def test_a_route_of_an_engine_that_has_nothing_of_deeplink() -> None:
    """As placements have for engines of SGLang and LMDeploy that serve alone."""
    everyone = table([*engines().engines, Engine("x", "http://x", "", None, "", kind=PLAIN)])
    routes = Routes([route("x", "x", 1, 100), route("p1", "d1")])
    assert served(routes, 100, 3, everyone) == {"x": 3}
    assert served(routes, 101, 3, everyone) == {"p1 d1": 3}


def test_what_cannot_be_handed_over_goes_to_who_decodes() -> None:
    assert served(Routes([route("p2", "d2")]), 10, 2, handoff=False) == {"d2": 2}


def test_another_route_serves_for_one_that_is_down() -> None:
    routes = Routes([route("p1", "d1", 9), route("p2", "d2", 1)])
    assert served(routes, 10, of=engines("p1")) == {"p2 d2": 100}
    assert served(routes, 10)["p1 d1"] == pytest.approx(90, abs=2)  # and is not owed anything


def test_other_engines_serve_when_no_route_can() -> None:
    assert served(Routes([route("p1", "d1")]), 10, 1, of=engines("d1")) == {"p1 d2": 1}
    with pytest.raises(NoEngine):
        served(Routes([route("p1", "d1")]), 10, of=engines("p1 p2 d1 d2 b"))


def test_a_full_route_is_waited_for() -> None:
    """Rather than served by engines that were not planned for this length."""
    full = Shut("full", full=True)
    with pytest.raises(Overloaded):
        served(Routes([route("p1", "d1")]), 10, shut={"d1": full})
    assert served(Routes([route("p1", "d1"), route("p2", "d2")]), 10, shut={"d1": full}) == {"p2 d2": 100}


def test_short_prompts_stay_in_one_engine_and_long_ones_are_handed_over() -> None:
    async def test() -> None:
        both = FakeEngine("b", make_contract("both", channel="127.0.0.1:43"))
        routes = [{"up_to": 20, "prefill": ["b"], "decode": ["b"]}, {"prefill": ["p"], "decode": ["d"]}]
        async with rig(*pair(), both, routes=routes) as served_:
            for words, path, decode in ((5, "plain", "b"), (200, "handoff", "d"), (5, "plain", "b")):
                got = await served_.complete({"model": "m", "prompt": "word " * words, "max_tokens": 4})
                assert got.status == 200, got.data
                assert (got.headers["x-deeplink-path"], got.headers["x-deeplink-decode"]) == (path, decode)

    check(test)


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=5), st.integers(0, 1000))
def test_every_stretch_has_its_shares(weights: list[float], start: int) -> None:
    count = 400
    given_ = Counter(place(weights, turn) for turn in range(start, start + count))
    for index, weight in enumerate(weights):
        assert given_[index] == pytest.approx(count * weight / sum(weights), abs=6)


def test_a_route_names_engines_that_are_listed() -> None:
    data = {
        "engines": [{"name": "a", "url": "http://a:1"}],
        "routes": [{"prefill": ["a"], "decode": ["b"]}],
    }
    with pytest.raises(ConfigError, match=r"routes\[0\] names an engine that is not listed: b"):
        config.parse(data, "test")


def test_an_edit_of_the_file_takes_effect_without_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        a, b = (FakeEngine(name, make_contract("both")) for name in "ab")
        path = tmp_path / "deeplink.toml"

        def write(*listed: FakeEngine, to: str) -> config.Config:
            text = "".join(
                f'[[engines]]\nname = "{e.name}"\nurl = "{e.url}"\ncontrol = "{e.control}"\n' for e in listed
            )
            draft = path.with_suffix(".new")
            draft.write_text(f'[router]\nport = 0\n{text}[[routes]]\nprefill = ["{to}"]\ndecode = ["{to}"]\n')
            os.replace(draft, path)
            return config.load(path)

        async with running(a, b):
            read = write(a, b, to="a")
            app = make_app(read, SECRET, path=path)
            async with serving(app, read.router, shutdown=1.0) as port, aiohttp.ClientSession() as client:

                async def served_by(count: int = 4) -> set[str]:
                    found = set()
                    for _ in range(count):
                        async with client.post(
                            f"http://127.0.0.1:{port}/v1/completions",
                            json={"model": "m", "prompt": "hello", "max_tokens": 4},
                        ) as answer:
                            assert answer.status == 200
                            found.add(answer.headers["x-deeplink-decode"])
                    return found

                async def until_served_by(name: str) -> None:
                    app[LISTED].look_now()
                    while await served_by() != {name}:  # the rig's deadline ends this
                        await asyncio.sleep(0.02)

                assert await served_by() == {"a"}
                write(a, b, to="b")
                await until_served_by("b")
                path.write_text(path.read_text().replace('["b"]', '["c"]'))  # names no engine: nothing changes
                app[LISTED].look_now()
                await until(lambda: "stay as they are" in caplog.text)
                assert await served_by() == {"b"}
                write(a, to="a")  # the engine of the route before it is gone
                await until_served_by("a")

    with caplog.at_level(logging.ERROR):
        check(test)
