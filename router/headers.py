"""Which HTTP headers pass through. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, AnyStr

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


class _Verdicts(dict[Any, bool]):
    """Whether a header of this name passes, as text or as bytes. Remembered for as many names as clients really use."""

    def __init__(self, decide: Callable[[str], bool]) -> None:
        super().__init__()
        self._decide = decide

    def __missing__(self, name: str | bytes) -> bool:
        verdict = self._decide((name if isinstance(name, str) else name.decode("latin-1")).lower())
        if len(self) < _NAMES and len(name) < _LENGTH:
            self[name] = verdict
        return verdict


_NAMES, _LENGTH = 1024, 64
_forwards = _Verdicts(lambda name: name not in _HOP | _OURS and not name.startswith((PREFIX, _OURS_TOO)))
_returns = _Verdicts(_BACK.__contains__)


def to_engine(headers: Iterable[tuple[AnyStr, AnyStr]], *, key: bool = True) -> list[tuple[AnyStr, AnyStr]]:
    """All of a client's headers but those of its connection, those the router sets, and ours. Its key only with `key`:
    one that opens the router is nobody else's."""
    kept, drop = [], set() if key else {"authorization"}
    for pair in headers:
        if _forwards[pair[0]]:
            kept.append(pair)
        elif len(pair[0]) == 10 and _text(pair[0]) == "connection":
            drop |= {word.strip() for word in _text(pair[1]).split(",")}
    if drop - _TOKENS:
        return [pair for pair in kept if _text(pair[0]) not in drop]
    return kept


def to_client(headers: Iterable[tuple[AnyStr, AnyStr]]) -> list[tuple[AnyStr, AnyStr]]:
    """Of an engine's answer, what the client has a use for."""
    return [pair for pair in headers if _returns[pair[0]]]


def texts(pairs: Iterable[tuple[bytes, bytes]]) -> Headers:
    return [(name.decode("latin-1"), value.decode("utf-8", "surrogateescape")) for name, value in pairs]


def _text(value: str | bytes) -> str:
    return (value if isinstance(value, str) else value.decode("latin-1")).lower()
