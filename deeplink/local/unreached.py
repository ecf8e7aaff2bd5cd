"""Why an endpoint could not be asked, in words, and what to do about it. Pure."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl

from deeplink.errors import LocalError

_START = "start it, or correct the address"
_LOG = "look into its log; it may have ended"


def unreached(where: str, exc: BaseException, seconds: float) -> LocalError:
    """`exc` is what http.client, a socket or aiohttp raised; `seconds` is how long it was waited for, in all."""
    # aiohttp keeps the reason why it could not connect inside an error of its own.
    cause = getattr(exc, "os_error", None) or exc
    if isinstance(cause, (TimeoutError, asyncio.TimeoutError)):  # two classes in Python 3.10
        return LocalError(
            f"{where} did not answer within {seconds:.3g} s",
            remedy="see whether it runs and is not overloaded, and whether something on the way drops connections",
        )
    if isinstance(cause, ConnectionRefusedError):
        return LocalError(f"{where} cannot be reached: nothing listens there (connection refused)", remedy=_START)
    if isinstance(cause, socket.gaierror):
        return LocalError(
            f"{where} cannot be reached: its host's name is not known ({cause.strerror})", remedy="correct the address"
        )
    if isinstance(cause, ssl.SSLError):
        return LocalError(
            f"{where} cannot be reached over TLS: {cause.reason or cause.strerror or cause}",
            remedy="use http:// for an endpoint without TLS; a certificate has to be one that this host trusts",
        )
    if isinstance(cause, (http.client.IncompleteRead, ConnectionError)):
        return LocalError(f"{where} ended the connection before it had answered: {_words(cause)}", remedy=_LOG)
    if isinstance(cause, OSError):
        return LocalError(f"{where} cannot be reached: {cause.strerror or _words(cause)}", remedy=_START)
    if isinstance(cause, (ValueError, http.client.InvalidURL)):
        return LocalError(
            f"{where} is not the URL of an endpoint: {cause}", remedy="give one such as http://127.0.0.1:8000"
        )
    return LocalError(f"{where} does not answer as HTTP endpoints do: {_words(cause)}", remedy="correct the address")


def _words(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}".removesuffix(": ")
