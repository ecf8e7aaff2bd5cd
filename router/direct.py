"""One request from beginning to end without a task of its own: a single call, whose answer comes in one piece.

That is what most requests are, and a task takes longer than all that is done here. Whatever turns out otherwise goes on
as a task, with the call that was made.
"""

from __future__ import annotations

import time
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from deeplink.router.exchange import Exchange
from deeplink.router.flow import Begun
from deeplink.router.headers import PREFIX, lines

if TYPE_CHECKING:
    from deeplink.router.api import Api
    from deeplink.router.client import Client


class Direct:
    """What runs for a client, as a task would."""

    __slots__ = ("_api", "_begun", "_client", "_exchange")

    def __init__(self, api: Api, client: Client, exchange: Exchange, begun: Begun) -> None:
        self._api = api
        self._client = client
        self._exchange = exchange
        self._begun = begun
        begun.reply.then(partial(client.guarded, self._answered))

    def cancel(self) -> None:
        """The client has left."""
        self._begun.reply.then(_nothing)
        self._begun.drop()
        self._api.note(self._exchange, "gone", None, 0.0)
        self._client.done()

    def _answered(self) -> None:
        api, client, exchange, begun = self._api, self._client, self._exchange, self._begun
        data = api.flow.ended(exchange, begun)
        if data is None:
            client.task(api.serve(exchange, client, begun))
            return
        first = time.monotonic() - exchange.since
        api.metrics.first_byte(exchange, first)
        client.answer(200, begun.reply.heading.passed + _marks(exchange.decode), data)
        api.note(exchange, "200", None, first)
        client.done()


@lru_cache(1024)
def _marks(engine: str) -> bytes:
    """As `Exchange.marks` of a plain request."""
    return lines([(f"{PREFIX}path", "plain"), (f"{PREFIX}decode", engine)])


def _nothing() -> None:
    """Nobody waits for the answer."""
