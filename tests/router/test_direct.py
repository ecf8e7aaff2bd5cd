"""A request served without a task of its own gets what a task would have given it, and leaves the same behind."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.router.flow import Flow
from deeplink.router.parts import ADMISSION, METRICS, RECENT

from .fake_engine import FakeEngine, answers, cut_short, dies, running
from .rig import Rig, check, router, until

Outcome = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def in_chunks(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Type": "application/json", "X-Request-Id": "r"})
    await answer.prepare(request)
    for piece in (b'{"choices":', b"[]}"):
        await answer.write(piece)
        await asyncio.sleep(0.005)
    await answer.write_eof()
    return answer


async def events(request: web.Request) -> web.StreamResponse:
    """Although none were asked for."""
    return web.Response(body=b"data: {}\n\ndata: [DONE]\n\n", content_type="text/event-stream")


async def asked_to_wait(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "busy"}}, status=429, headers={"Retry-After": "7"})


async def closes(request: web.Request) -> web.StreamResponse:
    answer = web.json_response({"choices": []})
    answer.force_close()
    return answer


OUTCOMES: dict[str, Outcome | None] = {
    "well": None,
    "large": answers(200, b'{"x":"' + b"x" * 600_000 + b'"}'),
    "in chunks": in_chunks,
    "events": events,
    "closes": closes,
    "blank": answers(200, b" \n"),
    "empty": answers(200, b""),
    "400": answers(400),
    "404": answers(404),
    "429": asked_to_wait,
    "500": answers(500),
    "503": answers(503),
    "dies": dies,
    "cut": cut_short,
}
BODIES: list[Any] = [
    {"prompt": "x", "max_tokens": 3},
    {"prompt": [1, 2, 3], "user": "u"},
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "caf\u00e9"}]}],
        "vllm_xargs": {"with_cache": 1},
    },
    {"kv_transfer_params": {}},
    {"prompt": "x" * 300_000},
]
asked = st.lists(
    st.tuples(
        st.sampled_from(["well", "well", "well", *OUTCOMES]),
        st.sampled_from(BODIES),
        st.sampled_from(["/v1/completions", "/v1/chat/completions", "/v1/embeddings?a=%20b"]),
    ),
    min_size=1,
    max_size=5,
)


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(re.sub(r" ms=\d+", "", record.getMessage()))


async def served(steps: list[tuple[str, Any, str]], section: dict[str, Any]) -> dict[str, Any]:
    """All that is to be seen of a router that is asked this, one after the other."""
    said, log = Said(), logging.getLogger("deeplink.router.app")
    before = log.level
    log.addHandler(said)
    log.setLevel(logging.INFO)
    try:
        return await _served(steps, section, said)
    finally:
        log.removeHandler(said)
        log.setLevel(before)


async def _served(steps: list[tuple[str, Any, str]], section: dict[str, Any], said: Said) -> dict[str, Any]:
    engines = [FakeEngine(name, kind="plain", contract=None) for name in "ab"]  # type: ignore[arg-type]
    async with running(*engines), router(*engines, breaker_failures=2, breaker_seconds=60.0, **section) as route:
        got = []
        for outcome, body, path in steps:
            for engine in engines:
                engine.answer = OUTCOMES[outcome]
                engine.others = {"/v1/embeddings": OUTCOMES[outcome] or {"data": []}}
            answer = await route.complete(body, path)
            headers = {name.lower(): value for name, value in answer.headers.items() if name != "Date"}
            got.append((answer.status, re.sub(rb"127\.0\.0\.1:\d+", b"", answer.data), headers))
        admission = route.app[ADMISSION]
        await until(lambda: admission.load.idle and not route.app[RECENT].live)
        return {
            "answers": got,
            "asked": [
                [
                    (
                        call.path,
                        call.query,
                        call.raw,
                        sorted(pair for pair in call.headers.items() if pair[0] != "Host"),
                    )
                    for call in engine.calls
                ]
                for engine in engines
            ],
            "log": said.lines,
            "breakers": {name: breaker.failures for name, breaker in admission._breakers.items() if breaker.failures},
            "shut": set(admission.shut()),
            "metrics": counted(route),
            "ended": [(one.path, one.status, one.first > 0) for one in route.app[RECENT].lately()],
        }


def counted(route: Rig) -> list[str]:
    """The counters that are of requests, without what was measured in seconds."""
    lines = route.app[METRICS].text().decode().splitlines()
    kept = [line for line in lines if re.match(r"deeplink_(requests|errors|retries|handoffs|\w+_count)", line)]
    return sorted(line for line in kept if "_created" not in line)


@settings(max_examples=20, deadline=None)
@given(asked, st.sampled_from(["round_robin", "least_load", "prefix"]))
def test_with_a_task_and_without_one(steps: list[tuple[str, Any, str]], policy: str) -> None:
    async def test() -> None:
        section = {"decode_policy": policy, "paths": ["/v1/embeddings"]}
        direct = await served(steps, section)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Flow, "begin", lambda flow, exchange: None)
            assert direct == await served(steps, section)

    check(test)
