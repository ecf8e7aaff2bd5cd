"""Which HTTP headers pass through. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import AnyStr

from deeplink.router.names import Names

Headers = list[tuple[str, str]]

PREFIX = "x-deeplink-"
JSON_LINE = b"Content-Type: application/json\r\n"
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


def _forwarded(name: str) -> bool:
    return name not in _HOP and name not in _OURS and not name.startswith((PREFIX, _OURS_TOO))


_with_key = Names(_forwarded, False)
_without_key = Names(lambda name: name != "authorization" and _forwarded(name), False)
_returned = Names(dict.fromkeys(_BACK, True), False)


def to_engine(headers: Sequence[tuple[AnyStr, AnyStr]], *, key: bool = True) -> list[tuple[AnyStr, AnyStr]]:
    """All of a client's headers but those of its connection, those the router sets, and ours. Its key only with `key`:
    one that opens the router is nobody else's."""
    kept = unnamed(headers, key=key)
    named: set[str] = set()
    for name, value in headers:
        if _text(name) == "connection":
            named |= {word.strip() for word in _text(value).split(",")}
    return [pair for pair in kept if _text(pair[0]) not in named] if named else kept


def unnamed(headers: Sequence[tuple[AnyStr, AnyStr]], *, key: bool) -> list[tuple[AnyStr, AnyStr]]:
    """The same where no header `Connection` names others."""
    passes = _with_key if key else _without_key
    return [pair for pair in headers if passes[pair[0]]]


def to_client(headers: Iterable[tuple[AnyStr, AnyStr]]) -> list[tuple[AnyStr, AnyStr]]:
    """Of an engine's answer, what the client has a use for."""
    return [pair for pair in headers if _returned[pair[0]]]


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
