"""How a ticket comes from a request's body to LMDeploy's engine.

LMDeploy carries what another engine's migration needs through its server and its processes: where to read from, and
what. So on its way in, the body's ticket is put into such a request, in the place of the other engine's name.
"""

from __future__ import annotations

import json
from typing import Any

from deeplink.kvconnector import passage
from deeplink.kvconnector.passage import Application

PREFIX = "deeplink-"
PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
PRODUCE = "produce"
PORT = "DEEPLINK_CONTROL_PORT"
"""The environment variable by which a server tells its engine's process where the control endpoint has to be."""
_TCP = 1
"""Of LMDeploy's protocols; none of them is spoken."""


class Passage(passage.Passage):
    """ASGI middleware of LMDeploy's server."""

    def __init__(self, app: Application) -> None:
        super().__init__(app, PATHS, rewrite)


def rewrite(body: bytes) -> bytes | None:
    """The body with its ticket where LMDeploy carries it; None if it has none, or is not a JSON object."""
    if (found := passage.taken(body)) is None:
        return None
    fields, side, ticket = found
    fields["migration_request"] = {
        "protocol": _TCP,
        "remote_engine_id": f"{PREFIX}{side}-{ticket}",
        "remote_session_id": 0,
        "remote_token_id": 0,
        "remote_block_ids": [],
    }
    # With these LMDeploy's server would look for blocks in the answer.
    for name in ("with_cache", "preserve_cache"):
        fields.pop(name, None)
    return json.dumps(fields).encode()


def read(asked: Any) -> tuple[str, str] | None:
    """The side and the text of the ticket that `rewrite` has put into this migration request; None for one of
    LMDeploy's own, or none at all."""
    name = asked.remote_engine_id if asked is not None else ""
    if not name.startswith(PREFIX):
        return None
    side, _, text = name.removeprefix(PREFIX).partition("-")
    return side, text
