"""Small bounded calls to an engine: to its control endpoint for its contract, why a handoff failed, and cancelling one;
and to others' APIs for what they say of themselves."""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp
import msgspec

from deeplink import secret as shared
from deeplink.errors import ConfigError, PeerGone, ProtocolError, Reason
from deeplink.kvconnector.contracts import contract as contracts
from deeplink.kvconnector.contracts.contract import Contract

SECONDS = 1.0
POST_SECONDS = 5.0
HEALTH_SECONDS = 5.0
"""Some engines compute a token before they say that they are well, for which SGLang alone takes a second."""
STAGE_SECONDS = 30.0
"""For which one question after a stage is kept open."""
MAX_STATE = 64 << 10

log = logging.getLogger(__name__)


class HandoffState(msgspec.Struct, frozen=True):
    """What one side says about a handoff; the members the router reads."""

    handoff: str
    state: str
    reason: Reason | None = None


class Stage(msgspec.Struct, frozen=True):
    """How far a prefill is (`kvconnector.handoffs.handoff.BEGUN` and its like)."""

    stage: int


class Blocks(msgspec.Struct, frozen=True):
    total: int = 0
    held: int = 0


class Status(msgspec.Struct, frozen=True):
    """How an engine is doing; the members the router reads."""

    blocks: Blocks = Blocks()
    early: bool = False


_UNSAID = (PeerGone, msgspec.DecodeError, RecursionError)
"""How an engine says nothing: it does not answer, or not with JSON, or with what is nested deeper than any answer."""

_state = msgspec.json.Decoder(HandoffState)
_stage = msgspec.json.Decoder(Stage)
_status = msgspec.json.Decoder(Status)


class Control:
    """The control endpoints of all engines. Every call ends within SECONDS, or as many as its caller says. Made in a
    running loop; `close` it."""

    def __init__(self, secret: bytes) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            timeout=aiohttp.ClientTimeout(total=SECONDS),
            headers={"Authorization": f"Bearer {shared.control_token(secret)}"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        # The token is no business of engines that have no control endpoint.
        self._bare = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            timeout=aiohttp.ClientTimeout(total=SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def contract(self, url: str) -> Contract:
        """Raises PeerGone, ConfigError (another secret), ProtocolError, or Refused (another wire version)."""
        status, data = await self._call("GET", f"{url}/v1/contract", contracts.MAX_BYTES)
        if status == 401:
            raise ConfigError(
                f"the control endpoint {url} does not take this router's secret",
                field="secret_file",
                remedy="give the router and all engines the same secret_file",
            )
        if status != 200:
            raise ProtocolError(f"the control endpoint {url} answered {status}", field="status", theirs=str(status))
        return contracts.decode(data)

    async def status(self, url: str) -> Status | None:
        """None if the engine does not say."""
        try:
            status, data = await self._call("GET", f"{url}/v1/status", MAX_STATE)
            return _status.decode(data) if status == 200 else None
        except _UNSAID as exc:
            log.debug("no status from %s: %s", url, exc)
            return None

    async def handoff(self, url: str, handoff: str) -> HandoffState | None:
        """What the engine says about this handoff; None if it knows nothing, or does not say."""
        try:
            status, data = await self._call("GET", f"{url}/v1/handoffs/{handoff}", MAX_STATE)
            return _state.decode(data) if status == 200 else None
        except _UNSAID as exc:
            log.debug("no state of handoff %s from %s: %s", handoff, url, exc)
            return None

    async def stage(self, url: str, handoff: str, known: int, until: float) -> int | None:
        """How far the engine's prefill is (`kvconnector.handoffs.handoff.BEGUN` and its like) once it is further than
        `known`. None if the engine does not say, or has not got further by `until` (of time.monotonic)."""
        while (left := until - time.monotonic()) > 0:
            seconds = min(left, STAGE_SECONDS)
            path = f"{url}/v1/handoffs/{handoff}/stage?known={known}&seconds={seconds:.3f}"
            try:
                status, data = await self._call("GET", path, MAX_STATE, seconds=seconds + SECONDS)
                stage = _stage.decode(data).stage if status == 200 else None
            except _UNSAID as exc:
                log.debug("no stage of handoff %s from %s: %s", handoff, url, exc)
                return None
            if stage is None or stage > known:
                return stage
        return None

    async def cancel(self, url: str, handoff: str) -> None:
        """Cancel the handoff if it is still open. An engine that cannot be reached ends it at the ticket's
        deadline."""
        try:
            await self._call("DELETE", f"{url}/v1/handoffs/{handoff}", MAX_STATE)
        except PeerGone as exc:
            log.debug("handoff %s not cancelled at %s: %s", handoff, url, exc)

    async def alive(self, url: str) -> None:
        """Whether an engine answers its ``/health`` well. Raises PeerGone, or ProtocolError with the status."""
        status, _ = await self._call("GET", f"{url}/health", MAX_STATE, self._bare, seconds=HEALTH_SECONDS)
        if status >= 300:
            raise ProtocolError(f"{url}/health answered {status}", field="status", theirs=str(status))

    async def get(self, url: str, limit: int = MAX_STATE) -> tuple[int, bytes]:
        """Of an engine that is told no token: status, and at most `limit` + 1 bytes. Raises PeerGone."""
        return await self._call("GET", url, limit, self._bare)

    async def post(
        self, url: str, body: bytes, limit: int = MAX_STATE, seconds: float = POST_SECONDS
    ) -> tuple[int, bytes]:
        """As `get`, with JSON; whoever is asked may have something to do for it."""
        return await self._call("POST", url, limit, self._bare, body, seconds)

    async def close(self) -> None:
        await self._session.close()
        await self._bare.close()

    async def _call(
        self,
        method: str,
        url: str,
        limit: int,
        session: aiohttp.ClientSession | None = None,
        body: bytes | None = None,
        seconds: float = SECONDS,
    ) -> tuple[int, bytes]:
        """Status and at most `limit` + 1 bytes of the body."""
        try:
            async with (session or self._session).request(
                method,
                url,
                allow_redirects=False,
                data=body,
                headers=None if body is None else {"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=seconds),
            ) as response:
                data = bytearray()
                async for chunk in response.content.iter_any():
                    data += chunk
                    if len(data) > limit:
                        break
                return response.status, bytes(data[: limit + 1])
        except asyncio.TimeoutError as exc:
            raise PeerGone(f"no answer from {url} within {seconds:g} s") from exc
        except aiohttp.ClientConnectorError as exc:
            raise PeerGone(f"cannot connect to {url}: {exc.strerror or exc.os_error}") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise PeerGone(f"{url}: {type(exc).__name__}: {exc}") from exc
