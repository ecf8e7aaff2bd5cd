"""The operators' API is what its OpenAPI document says, whatever is sent to it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.core.parameters import ParameterLocation
from schemathesis.specs.openapi.checks import ignored_auth, negative_data_rejection, positive_data_acceptance

from deeplink import config as configs
from deeplink import secret as secrets
from deeplink.errors import PeerGone
from deeplink.router import openapi
from deeplink.router.app import make_app
from deeplink.router.control import Control
from deeplink.router.serve import serving

from .fake_engine import SECRET
from .rig import check, rig

KEY = "admin-key-0123456789"
OPERATOR = {"Authorization": f"Bearer {KEY}"}
ENGINE = {"Authorization": f"Bearer {secrets.control_token(SECRET)}"}
EXAMPLES = 25

schema = schemathesis.openapi.from_dict(openapi.document())


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A router in a thread of its own. Nothing answers where the engines are said to be, at once."""
    keys: Path = tmp_path_factory.mktemp("openapi") / "admin"
    keys.write_text(KEY)
    config = configs.parse({"router": {"port": 0, "admin_keys_file": str(keys), "poll": 60.0}}, "test")
    ready, found = threading.Event(), []
    loop, over = asyncio.new_event_loop(), asyncio.Event()

    async def gone(self: Control, method: str, url: str, *rest: Any) -> Any:
        raise PeerGone(f"nobody at {url}")

    async def serve() -> None:
        async with serving(make_app(config, SECRET), config.router, shutdown=1.0) as port:
            found.append(f"http://127.0.0.1:{port}")
            ready.set()
            await over.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Control, "_call", gone)
        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
        thread.start()
        assert ready.wait(10)
        yield found[0]
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        assert not thread.is_alive()
    loop.close()


@schema.parametrize()
@settings(max_examples=EXAMPLES, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_as_described(case: Any, url: str) -> None:
    key = ENGINE if "registrations" in case.path else OPERATOR
    # A body may be right by its schema, and yet name a port that is none or a kind that nobody has; and the keys are
    # looked at below.
    excluded = [positive_data_acceptance, ignored_auth]
    body = case.meta.components.get(ParameterLocation.BODY)
    if body is None or not body.mode.is_negative:  # what else it does not know it ignores, as HTTP servers do
        excluded.append(negative_data_rejection)
    case.call_and_validate(base_url=url, headers=key, timeout=5, excluded_checks=excluded)


@schema.parametrize()
@settings(max_examples=2, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_nothing_is_done_without_the_right_key(case: Any, url: str) -> None:
    other = OPERATOR if "registrations" in case.path else ENGINE
    for headers in ({}, other, {"Authorization": f"Basic {KEY}"}):
        answer = case.call(base_url=url, headers=headers, timeout=5)
        assert answer.status_code == 401, answer.text


def test_the_document_is_served(tmp_path: Path) -> None:
    (tmp_path / "admin").write_text(KEY)

    async def test() -> None:
        async with rig(admin_keys_file=str(tmp_path / "admin")) as route:
            got = await route.get("/deeplink/v1/openapi.json", headers=OPERATOR)
            assert json.loads(got.data) == openapi.document()

    check(test)
