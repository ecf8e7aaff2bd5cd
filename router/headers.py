"""Which HTTP headers pass through. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import AnyStr

from deeplink.router.names import Names

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
_TOKENS = {"keep-alive", "close"}
_BACK = {
    "cache-control",
    "content-type",
    "retry-after",
    "retry-after-ms",
    "www-authenticate",
    "x-request-id",
    "x-should-retry",
}


_PASSES, _KEY, _NAMES_OTHERS = 1, 2, 3


def _forwarded(name: str) -> int:
    if name == "connection":
        return _NAMES_OTHERS
    if name in _HOP or name in _OURS or name.startswith((PREFIX, _OURS_TOO)):
        return 0
    return _KEY if name == "authorization" else _PASSES


_forwards = Names(_forwarded)
_returns = Names(dict.fromkeys(_BACK, 1))


def to_engine(headers: Iterable[tuple[AnyStr, AnyStr]], *, key: bool = True) -> list[tuple[AnyStr, AnyStr]]:
    """All of a client's headers but those of its connection, those the router sets, and ours. Its key only with `key`:
    one that opens the router is nobody else's."""
    kept = []
    named: set[str] = set()
    for pair in headers:
        meaning = _forwards[pair[0]]
        if meaning == _PASSES or (key and meaning == _KEY):
            kept.append(pair)
        elif meaning == _NAMES_OTHERS:
            named |= {word.strip() for word in _text(pair[1]).split(",")} - _TOKENS
    return [pair for pair in kept if _text(pair[0]) not in named] if named else kept


def to_client(headers: Iterable[tuple[AnyStr, AnyStr]]) -> list[tuple[AnyStr, AnyStr]]:
    """Of an engine's answer, what the client has a use for."""
    return [pair for pair in headers if _returns[pair[0]]]


def lines(headers: Collection[tuple[str, str]]) -> bytes:
    """As they are sent. Raises ValueError for one that would end its line itself."""
    whole = "".join([f"{name}: {value}\r\n" for name, value in headers])
    if whole.count("\n") != len(headers) or whole.count("\r") != len(headers):
        raise ValueError("a line end within a header")
    return whole.encode("utf-8", "surrogateescape")


def raw_lines(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Those that came as bytes, for which the parser has seen to that."""
    return b"".join([b"%b: %b\r\n" % pair for pair in pairs])


def texts(pairs: Iterable[tuple[bytes, bytes]]) -> Headers:
    return [(name.decode("latin-1"), value.decode("utf-8", "surrogateescape")) for name, value in pairs]


def _text(value: str | bytes) -> str:
    return (value if isinstance(value, str) else value.decode("latin-1")).lower()
