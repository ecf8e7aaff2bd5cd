"""How a ticket comes from a request's body to the scheduler.

SGLang carries only fields that it knows, of which two are there for disaggregation: the host and the room of a request.
So on its way in, the body's ticket is moved into these; what a client has put there itself is lost with it.
"""

from __future__ import annotations

import hashlib
import json

from deeplink.errors import TicketRefused
from deeplink.kvconnector import passage
from deeplink.kvconnector.passage import Application

PREFIX = "deeplink-"
PATHS = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})


class Passage(passage.Passage):
    """ASGI middleware of SGLang's server."""

    def __init__(self, app: Application) -> None:
        super().__init__(app, PATHS, rewrite)


def rewrite(body: bytes) -> bytes | None:
    """The body with its ticket where SGLang carries it; None if it has none, or is not a JSON object."""
    if (found := passage.taken(body)) is None:
        return None
    fields, side, ticket = found
    # Any room but none makes SGLang take the request for one of a pair; the scheduler sets the ticket's.
    fields |= {"bootstrap_host": f"{PREFIX}{side}-{ticket}", "bootstrap_port": None, "bootstrap_room": 1}
    return json.dumps(fields).encode()


def read(host: str | None, side: str) -> str | None:
    """The ticket's text that `rewrite` has put into a request's host; None if that is a host. Raises TicketRefused for
    one that is meant for the other side."""
    if not host or not host.startswith(PREFIX):
        return None
    meant, _, text = host.removeprefix(PREFIX).partition("-")
    if meant != side:
        raise TicketRefused(
            f"the ticket is to {meant}, and this engine is there to {side}", field="side", ours=side, theirs=meant
        )
    return text


def room(handoff: str) -> int:
    """A number for SGLang to tell requests apart by, which is never 0."""
    return int.from_bytes(hashlib.blake2b(handoff.encode(), digest_size=7).digest(), "little") | 1
