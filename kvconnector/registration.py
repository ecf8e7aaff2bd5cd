"""An engine tells a router that it is there, again and again, and at last that it goes.

A router that is away, or that does not believe this engine, is told about in the log, once, and tried again: an engine
serves without one. The router takes an engine that has fallen silent for gone, so nothing here has to succeed.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import json
import logging
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from deeplink import bounded
from deeplink import secret as shared
from deeplink.errors import ConfigError, DeadlineExceeded, DeeplinkError, InvalidRequest, PeerGone, Unauthorized

PATH = "/deeplink/v1/registrations/"
SECONDS = 15.0
"""How long what the router was told holds; it is told again three times in that time."""
CALL_SECONDS = 4.0
LEAVE_SECONDS = 1.0
FIRST_WAIT = 0.5
LOOK_SECONDS, API_SECONDS = 0.1, 0.5
"""Between two looks whether this is to end, and whether the API still listens."""
MAX_ANSWER = 64 << 10

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Presence:
    """What the router is told: under which name and where this incarnation of the engine is, and how many seconds that
    holds. `url` is that of its API, `control` that of its control endpoint, `rank` which data-parallel rank behind the
    API it is, if there are several."""

    name: str
    url: str
    control: str
    epoch: str
    seconds: float = SECONDS
    rank: int | None = None

    @property
    def registered(self) -> str:
        """Its name at the router: data-parallel ranks behind one API are engines of their own there."""
        return self.name if self.rank is None else f"{self.name}/{self.rank}"


def name_of(url: str) -> str:
    """What an engine is called that nobody has named: by its address, so it keeps the name when it is restarted."""
    return urlsplit(url).netloc


class Registration:
    """Registers from `start` on, in a thread of its own, for as long as the API takes connections; `close` says
    farewell.

    An engine may be killed before it has shut down in order, so it leaves as soon as it is known to end: `end_soon` is
    for the handler of a signal, and an API that stops listening is another sign.
    """

    def __init__(
        self, router: str, presence: Presence, secret: bytes, log: logging.Logger = log, api: str | None = None
    ) -> None:
        """`router` is its URL, https with the host's own authorities. `api` is where the API listens, as seen from
        here, if that is not as others see it. Raises ConfigError for what is no router's URL. `log` is one that the
        engine shows."""
        self._router = Router(router, secret)
        self._presence = presence
        self._api = api or presence.url
        self._every = presence.seconds / 3
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deeplink-registration", daemon=True)
        self._ending = False
        self._sequence = 0
        self._told = ""
        self._log = log

    def start(self) -> None:
        self._thread.start()

    def end_soon(self) -> None:
        """Leave without being waited for. Takes no lock, so it may be called wherever the main thread happens to be."""
        self._ending = True

    def close(self) -> None:
        """Returns within CALL_SECONDS + LEAVE_SECONDS, whatever the router does."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(CALL_SECONDS + LEAVE_SECONDS)

    def _run(self) -> None:
        while not self._ending and self._wait_for_api():
            self._stay()

    def _wait_for_api(self) -> bool:
        """False once this is closed."""
        waits = _waits(self._every)
        while _listens(self._api) is not True:
            if self._stop.wait(next(waits)):
                return False
        return not self._stop.is_set()

    def _stay(self) -> None:
        """Until the API is gone or this is closed. Tries are never further apart than heartbeats, so a router that
        comes back soon has its engines."""
        waits, registered, wait = _waits(self._every), False, 0.0
        while not self._ends_within(wait):
            self._sequence += 1
            try:
                self._router.put(self._presence, self._sequence)
            except DeeplinkError as exc:
                self._tell(str(exc))
                wait = next(waits)
            else:
                if self._told or not registered:
                    self._log.info("registered with the router %s as %s", self._router.url, self._presence.name)
                waits, registered, wait, self._told = _waits(self._every), True, self._every, ""
        if registered:
            self._leave()

    def _ends_within(self, seconds: float) -> bool:
        now = time.monotonic()
        until, look = now + seconds, now + API_SECONDS
        while not self._ending and not self._stop.is_set():
            now = time.monotonic()
            if now >= until:
                return False
            if now >= look:
                look = now + API_SECONDS
                if _listens(self._api) is False:  # one that is merely busy does not refuse
                    return True
            self._stop.wait(min(until - now, LOOK_SECONDS))
        return True

    def _tell(self, why: str) -> None:
        """Once for each reason, not at every try."""
        if why != self._told:
            self._log.warning("the router %s does not have this engine, which goes on: %s", self._router.url, why)
            self._told = why

    def _leave(self) -> None:
        try:
            self._router.delete(self._presence, self._sequence)
        except DeeplinkError as exc:
            why = "the router %s will notice by itself that this engine is gone: %s"
            self._log.info(why, self._router.url, exc)


class Router:
    """The router as an engine sees it: two calls, each with a deadline."""

    def __init__(self, url: str, secret: bytes) -> None:
        self.url = check_url(url)
        self._token = shared.control_token(secret)

    def put(self, presence: Presence, sequence: int) -> None:
        """`sequence` counts up with each call. Raises a DeeplinkError that tells why the router does not have the
        engine."""
        body = {
            "url": presence.url,
            "control": presence.control,
            "epoch": presence.epoch,
            "sequence": sequence,
            "seconds": presence.seconds,
            "rank": presence.rank,
        }
        self._call("PUT", _path(presence.registered), json.dumps(body).encode(), CALL_SECONDS)

    def delete(self, presence: Presence, sequence: int | None = None) -> None:
        """`sequence` is that of the last `put`, as several routers may be told in another order; without it this
        incarnation does not come back."""
        query = f"epoch={quote(presence.epoch, safe='')}" + ("" if sequence is None else f"&sequence={sequence}")
        self._call("DELETE", f"{_path(presence.registered)}?{query}", b"", LEAVE_SECONDS)

    def _call(self, method: str, path: str, body: bytes, seconds: float) -> None:
        connection, deadline = self._connection(seconds), time.monotonic() + seconds
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            status, data = answer.status, bounded.read(answer, MAX_ANSWER, deadline)
        except TimeoutError as exc:
            raise DeadlineExceeded(f"it did not answer within {seconds:g} s") from exc
        except (OSError, http.client.HTTPException) as exc:
            raise PeerGone(f"it is not reached: {exc or type(exc).__name__}") from exc
        finally:
            connection.close()
        if status not in (200, 204):
            raise _refused(status, data)

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        if parts.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=seconds, context=context)
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)


def leave_at_exit(router: str, presence: Presence, secret: bytes) -> None:
    """When this process ends in order, the engine has left its router: for the process that started the engine, which
    may kill the engine's own before those could say so. To leave twice is no harm, nor where another incarnation has
    registered meanwhile."""
    known, process = Router(router, secret), os.getpid()

    def leave() -> None:
        # A child that was forked ends too, and the engine goes on. A router that is away notices by itself.
        if os.getpid() == process:
            with contextlib.suppress(DeeplinkError):
                known.delete(presence)

    atexit.register(leave)


def check_url(url: str) -> str:
    """A router's URL without a slash at its end. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    bare = url.rstrip("/")
    whole = bare == f"{parts.scheme}://{parts.netloc}" and parts.username is None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not whole:
        raise ConfigError(
            "the router's address is not a URL of scheme, host and port",
            field="deeplink-router",
            ours=url,
            theirs="http://HOST:PORT or https://HOST:PORT",
        )
    return bare


def _path(name: str) -> str:
    return PATH + quote(name, safe="")


def _refused(status: int, data: bytes) -> DeeplinkError:
    if status == 401:
        return Unauthorized(
            "it does not accept this engine's token",
            field="secret_file",
            remedy="give the engine and the router the same secret",
        )
    try:
        error = json.loads(data)["error"]
        message, field = str(error["message"])[:500], str(error.get("field") or "")[:100]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        message, field = "no deeplink router answers there", "deeplink-router"
    return InvalidRequest(f"it answers {status}: {message}", field=field)


def _listens(url: str) -> bool | None:
    """Whether the API takes connections: it does so once the engine is ready, long after its control endpoint. None
    if that is not to be found out."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=1.0).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def _waits(longest: float) -> Iterator[float]:
    """Seconds between tries: twice as long each time; a little by chance, so that not all engines come at once."""
    wait = min(FIRST_WAIT, longest)
    while True:
        yield wait * random.uniform(0.8, 1.0)
        wait = min(2 * wait, longest)
