"""Engines of other kinds hand over in their own ways, and nothing is kept of what was given up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from deeplink.router.parts import ADMISSION, FLEET

from .fake_engine import CHUNKS, FakeEngine, make_contract, running
from .fake_kinds import KINDS, Cache, Kin
from .rig import Rig, check, router, until

BOTH = pytest.mark.parametrize("kind", KINDS)


@asynccontextmanager
async def fleet(
    *kin: Kin, others: tuple[FakeEngine, ...] = (), opened: bool = True, **section: Any
) -> AsyncIterator[Rig]:
    engines = [one.engine for one in kin]
    async with running(*engines, *others):
        for one in kin:
            one.point_at_itself()
            if opened:
                one.open.set()
        async with router(*engines, *others, **section) as route:
            yield route


def pair(kind: str, **more: Any) -> tuple[Kin, Kin, Cache]:
    cache = Cache()
    return Kin("p", kind, cache), Kin("d", kind, cache, **more), cache


async def nothing_is_left(route: Rig, cache: Cache) -> None:
    await until(lambda: route.app[ADMISSION].load.idle)
    await until(lambda: not cache.kept)
    assert not cache.wrong


@BOTH
@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_is_handed_over_in_the_kinds_own_way(kind: str, streamed: bool) -> None:
    async def test() -> None:
        p, d, cache = pair(kind)
        async with fleet(p, d) as route:
            for path in ("/v1/completions", "/v1/chat/completions"):
                got = await route.complete({"prompt": "x", "stream": streamed, "odd": 1}, path)
                assert got.status == 200, got.data
                assert got.headers["x-deeplink-path"] == "handoff"
                assert (got.headers["x-deeplink-prefill"], got.headers["x-deeplink-decode"]) == ("p", "d")
                assert got.data == b"".join(CHUNKS) if streamed else json.loads(got.data)["choices"]
            assert [call.body["odd"] for call in (*p.requests, *d.requests)] == [1] * 4
            await nothing_is_left(route, cache)

    check(test)


@BOTH
def test_what_a_client_says_of_caches_reaches_no_engine(kind: str) -> None:
    async def test() -> None:
        p, d, cache = pair(kind)
        evil = {
            "kv_transfer_params": {"do_remote_prefill": True, "remote_request_id": "evil"},
            "bootstrap_host": "evil",
            "bootstrap_port": "evil",
            "bootstrap_room": "evil",
            "migration_request": "evil",
            "vllm_xargs": {"kv_transfer_params": "evil", "bootstrap_host": "evil"},
        }
        async with fleet(p, d) as route:
            got = await route.complete({"prompt": "x"} | evil, headers={"x-override-bootstrap-host": "evil"})
            assert got.status == 200
            for call in (*p.requests, *d.requests):
                assert b"evil" not in call.raw
                assert "evil" not in str(call.headers)
            await nothing_is_left(route, cache)

    check(test)


@BOTH
def test_engines_whose_settings_differ_are_no_pair(kind: str) -> None:
    async def test() -> None:
        p, d, _ = pair(kind, chip="b")
        async with fleet(p, d) as route:
            got = await route.complete({"prompt": "x"})
            assert (got.status, got.error["code"]) == (503, "contract_refused")
            assert (got.error["field"], got.error["ours"], got.error["theirs"]) == ("settings.chip", "a", "b")
            assert not p.requests + d.requests

    check(test)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("vllm-nixl", "block_size"), ("vllm-mooncake", "version"), ("sglang", "page_size"), ("lmdeploy", "tp_size")],
)
def test_what_engines_say_of_themselves_counts_as_declared(kind: str, name: str) -> None:
    async def test() -> None:
        p, d, _ = pair(kind, said={name: "64"})
        async with fleet(p, d) as route:
            got = await route.complete({"prompt": "x"})
            assert (got.status, got.error["field"]) == (503, f"settings.{name}")

    check(test)


def test_engines_that_compare_contracts_themselves_may_have_unlike_blocks() -> None:
    async def test() -> None:
        p, d, cache = pair("lmdeploy", said={"migration_backend": "deeplink", "block_size": "64"})
        p.said = {"migration_backend": "deeplink"}
        for one in (p, d):
            for name in ("chip", "dtype"):
                one.engine.declared["settings"].pop(name, None)
        async with fleet(p, d) as route:
            got = await route.complete({"prompt": "x"})
            assert (got.status, got.headers["x-deeplink-path"]) == (200, "handoff"), got.data
            await nothing_is_left(route, cache)

    check(test)


def test_one_engine_that_compares_contracts_is_not_enough() -> None:
    async def test() -> None:
        p, d, _ = pair("lmdeploy", said={"migration_backend": "deeplink"})
        async with fleet(p, d) as route:
            got = await route.complete({"prompt": "x"})
            assert got.status == 503
            assert got.error["field"].startswith("settings.")
            assert not p.requests + d.requests

    check(test)


@BOTH
def test_a_setting_that_nobody_knows_is_asked_for(kind: str) -> None:
    async def test() -> None:
        p, d, _ = pair(kind)
        del p.engine.declared["settings"]["chip"], d.engine.declared["settings"]["chip"]
        async with fleet(p, d) as route:
            got = await route.complete({"prompt": "x"})
            assert got.error["field"] == "settings.chip"
            assert "declare it for p and d" in got.error["remedy"]

    check(test)


def test_several_kinds_in_one_process_never_pair_with_each_other() -> None:
    async def test() -> None:
        caches = {kind: Cache() for kind in KINDS}
        kin = [Kin(f"{role}-{kind}", kind, caches[kind]) for kind in KINDS for role in "pd"]
        ours = (FakeEngine("p-ours", make_contract("prefill")), FakeEngine("d-ours", make_contract("decode")))
        async with fleet(*kin, others=ours, prefill_policy="round_robin") as route:
            pairs = set()
            for _ in range(20):
                got = await route.complete({"prompt": "x"})
                assert got.status == 200, got.data
                pairs.add((got.headers["x-deeplink-prefill"][2:], got.headers["x-deeplink-decode"][2:]))
            assert pairs == {(kind, kind) for kind in (*KINDS, "ours")}
            for cache in caches.values():
                await nothing_is_left(route, cache)

    check(test)


@BOTH
def test_a_client_that_leaves_while_prefill_runs_leaves_nothing_kept(kind: str) -> None:
    async def test() -> None:
        p, d, cache = pair(kind)
        async with fleet(p, d, opened=False) as route:
            task = asyncio.create_task(route.complete({"prompt": "x"}))
            await until(lambda: p.requests)
            task.cancel()
            # Prefill ends just after: its answer finds nobody who waits for it.
            await asyncio.sleep(0.05)
            p.open.set()
            d.open.set()
            await until(lambda: p.requests[0].over or p.requests[0].cancelled)
            await nothing_is_left(route, cache)
            if kind.startswith("vllm"):
                await until(lambda: d.requests)
                assert [call.body["max_tokens"] for call in d.requests] == [1]

    check(test)


@BOTH
def test_a_prefill_that_nobody_waits_for_is_cut(kind: str) -> None:
    async def test() -> None:
        p, d, cache = pair(kind)
        d.open.set()
        async with fleet(p, d, opened=False) as route:
            task = asyncio.create_task(route.complete({"prompt": "x"}))
            await until(lambda: p.requests)
            task.cancel()
            await until(lambda: p.requests[0].cancelled)
            await nothing_is_left(route, cache)

    check(test)


@BOTH
def test_a_prefill_that_fails_ends_the_decode_call_and_is_told(kind: str) -> None:
    async def test() -> None:
        p, d, cache = pair(kind)
        p.outcomes = ["500"]
        async with fleet(p, d, retries=0) as route:
            got = await route.complete({"prompt": "x"})
            assert (got.status, got.error["code"]) == (502, "prefill_failed")
            if kind == "sglang":
                await until(lambda: all(call.cancelled or call.over for call in d.requests))
            else:
                assert not d.requests
            await nothing_is_left(route, cache)

    check(test)


@BOTH
def test_a_decode_engine_that_cannot_be_reached_is_replaced(kind: str) -> None:
    async def test() -> None:
        cache = Cache()
        p, d0, d1 = (Kin(name, kind, cache) for name in ("p", "d0", "d1"))
        async with fleet(p, d0, d1, decode_policy="round_robin", poll=60) as route:
            await d0.engine.stop_api()
            for _ in range(4):
                got = await route.complete({"prompt": "x"})
                assert got.status == 200, got.data
                assert got.headers["x-deeplink-decode"] == "d1"
            # What was prefilled is used again, where nothing has been read of it.
            if kind != "sglang":
                assert len(p.requests) == 4
            await nothing_is_left(route, cache)

    check(test)


@BOTH
def test_no_decode_engine_left_means_the_cache_goes_too(kind: str) -> None:
    async def test() -> None:
        p, d, cache = pair(kind)
        async with fleet(p, d, retries=0, poll=60) as route:
            if kind == "lmdeploy":
                assert (await route.complete({"prompt": "x"})).status == 200  # they are connected
            await d.engine.stop_api()
            got = await route.complete({"prompt": "x"})
            assert got.status in (502, 503), got.data
            if kind.startswith("vllm"):
                return  # its own time limit ends it, and nothing else can
            await nothing_is_left(route, cache)

    check(test)


@pytest.mark.parametrize("kind", ["vllm-nixl", "lmdeploy"])
def test_an_engine_that_does_not_say_where_its_cache_is_has_failed(kind: str) -> None:
    async def test() -> None:
        p, d, _ = pair(kind)
        p.engine.answer = None  # answers as an engine without a connector
        async with fleet(p, d, retries=0) as route:
            got = await route.complete({"prompt": "x"})
            assert (got.status, got.error["code"]) == (502, "prefill_failed")
            assert got.error["field"] in ("kv_transfer_params", "session")
            assert not d.requests

    check(test)


def test_blocks_that_do_not_fit_the_prompt_never_reach_the_decode_engine() -> None:
    async def test() -> None:
        p, d, _ = pair("lmdeploy")
        async with fleet(p, d, retries=0) as route:
            original = p.engine.answer
            assert original is not None

            async def fewer(request: Any) -> Any:
                answer = await original(request)
                data = json.loads(answer.body)
                return type(answer)(body=json.dumps(data | {"cache_block_ids": [[7]]}), content_type="application/json")

            p.engine.answer = fewer
            got = await route.complete({"prompt": "x"})
            assert (got.status, got.error["field"]) == (502, "cache_block_ids")
            assert not d.requests

    check(test)


def test_one_number_that_is_no_blocks_passes_as_it_is() -> None:
    """Engines with deeplink's own migration backend name a whole cache by it."""

    async def test() -> None:
        p, d, _ = pair("lmdeploy")
        async with fleet(p, d, retries=0) as route:
            original = p.engine.answer
            assert original is not None

            async def named(request: Any) -> Any:
                answer = await original(request)
                changed = {"cache_block_ids": [(1 << 47) + 5], "usage": {"prompt_tokens": 900}}
                return type(answer)(body=json.dumps(json.loads(answer.body) | changed), content_type="application/json")

            p.engine.answer = named
            await route.complete({"prompt": "x"})
            (request,) = d.requests
            assert request.body["migration_request"]["remote_block_ids"] == [(1 << 47) + 5]

    check(test)


def test_two_engines_are_connected_once_and_again_after_a_restart() -> None:
    async def test() -> None:
        p, d, cache = pair("lmdeploy")
        async with fleet(p, d) as route:
            await asyncio.gather(*(route.complete({"prompt": "x"}) for _ in range(5)))
            assert [peer for peer, _ in d.linked] == [p.engine.url]
            p.engine.well = False
            await until(lambda: any(engine.down for engine in route.app[FLEET].table.engines))
            p.engine.well = True
            await until(lambda: not any(engine.down for engine in route.app[FLEET].table.engines))
            assert (await route.complete({"prompt": "x"})).status == 200
            assert [peer for peer, _ in d.linked] == [p.engine.url] * 2
            await nothing_is_left(route, cache)

    check(test)


@pytest.mark.parametrize("kind", ["vllm-nixl", "vllm-mooncake"])
def test_a_request_that_cannot_be_handed_over_is_decoded_by_one_that_can_serve_alone(kind: str) -> None:
    async def test() -> None:
        p, d, cache = pair(kind)
        async with fleet(p, d) as route:
            got = await route.complete({"prompt": "x", "n": 2})
            assert (got.status, got.headers["x-deeplink-path"]) == (200, "plain")
            assert not p.requests
            cache.wrong.clear()
            await nothing_is_left(route, cache)

    check(test)


def test_engines_that_serve_in_pairs_only_refuse_what_cannot_be_handed_over() -> None:
    async def test() -> None:
        p, d, _ = pair("sglang")
        async with fleet(p, d, min_prefill=100) as route:
            got = await route.complete({"prompt": "x", "n": 2})
            assert (got.status, got.error["code"], got.error["field"]) == (400, "invalid_request", "n")
            short = await route.complete({"prompt": "x"})
            assert (short.status, short.headers["x-deeplink-path"]) == (200, "handoff")

    check(test)


def test_several_prompts_get_a_room_each() -> None:
    async def test() -> None:
        p, d, _ = pair("sglang")
        p.engine.answer = d.engine.answer = None
        async with fleet(p, d) as route:
            assert (await route.complete({"prompt": ["x", "y", "z"]})).status == 200
            one, other = p.requests[0].body, d.requests[0].body
            assert one["bootstrap_room"] == other["bootstrap_room"]
            assert len(set(one["bootstrap_room"])) == len(one["bootstrap_host"]) == len(one["bootstrap_port"]) == 3

    check(test)


def test_a_data_parallel_rank_is_addressed() -> None:
    async def test() -> None:
        p, d, _ = pair("sglang")
        p.engine.declared["rank"], d.engine.declared["rank"] = 3, 1
        async with fleet(p, d) as route:
            assert (await route.complete({"prompt": "x"}, headers={"X-Data-Parallel-Rank": "9"})).status == 200
            for kin, rank in ((p, "3"), (d, "1")):
                call = kin.requests[0]
                assert call.headers.getall("x-data-parallel-rank") == [rank]
                assert call.body["disagg_prefill_dp_rank"] == 3

    check(test)


def test_an_engine_of_its_kind_that_does_not_hand_over_serves_alone() -> None:
    async def test() -> None:
        alone = Kin("b", "sglang", Cache())
        alone.engine.answer = None
        async with fleet(alone) as route:
            got = await route.complete({"prompt": "x"})
            assert (got.status, got.headers["x-deeplink-path"]) == (200, "plain")
            assert "bootstrap_room" not in alone.requests[0].body

    check(test)


def test_a_kind_that_nobody_has_is_refused_at_the_start() -> None:
    from deeplink.errors import PluginError

    async def test() -> None:
        engine = FakeEngine("x", make_contract("both"), kind="odd")
        async with running(engine):
            with pytest.raises(PluginError, match=r"odd.*lmdeploy, sglang, vllm-mooncake, vllm-nixl"):
                async with router(engine):
                    raise AssertionError

    check(test)
