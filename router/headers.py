"""Which HTTP headers pass through. Pure."""

from __future__ import annotations

from collections.abc import Iterable

Headers = list[tuple[str, str]]

PREFIX = "x-deeplink-"
_OURS_TOO = "x-override-bootstrap-"
"""With these SGLang lets a client say whose cache is to be read."""
_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
# The router speaks for itself about these: it sends other bytes than it read, and reads what it relays.
_OURS = {"accept-encoding", "content-encoding", "content-length", "expect", "host"}
_BACK = {
    "cache-control",
    "content-type",
    "retry-after",
    "retry-after-ms",
    "www-authenticate",
    "x-request-id",
    "x-should-retry",
}


def to_engine(headers: Iterable[tuple[str, str]], *, key: bool = True) -> Headers:
    """All of a client's headers but those of its connection, those the router sets, and ours. Its key only with `key`:
    one that opens the router is nobody else's."""
    headers = list(headers)
    named = {
        word.strip().lower() for name, value in headers if name.lower() == "connection" for word in value.split(",")
    }
    drop = _HOP | _OURS | named | (set() if key else {"authorization"})
    return [
        (name, value)
        for name, value in headers
        if name.lower() not in drop and not name.lower().startswith((PREFIX, _OURS_TOO))
    ]


def to_client(headers: Iterable[tuple[str, str]]) -> Headers:
    """Of an engine's answer, what the client has a use for."""
    return [(name, value) for name, value in headers if name.lower() in _BACK]
