"""The head of a client's request: what is refused although a parser takes it, and what the router reads in it. Pure.

The parser turns away what no two readers agree on: two lengths, a length beside chunks, line ends and spaces where none
belong. Here are the rest, and the limits that it does not have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import quote, unquote

MAX_HEAD = 64 << 10
"""Bytes of a request's head, and of what frames its chunks beyond what that takes."""
MAX_LINE = 8190
"""Bytes of its target, and of one header."""
MAX_HEADERS = 256

_CHUNKED = b"chunked"


@dataclass(slots=True, eq=False)
class Request:
    """One request as it arrived. `target` is as it was sent, `path` decoded and without the query; `pairs` are the
    headers in their order, names as they were sent; `given` are those about the request itself, in lower case."""

    method: str = ""
    target: str = ""
    path: str = ""
    pairs: list[tuple[bytes, bytes]] = field(default_factory=list)
    given: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    size: int = 0
    modern: bool = True
    keep: bool = True

    @property
    def length(self) -> int:
        """Of the body; 0 if it is not said. The parser has seen that it is a number."""
        return int(self.given.get(b"content-length", b"0"))

    @property
    def expects(self) -> bool:
        """Whether the client waits for leave to send its body."""
        given = self.given
        waits = b"expect" in given and given[b"expect"].lower() == b"100-continue"
        return waits and self.modern and (self.length > 0 or b"transfer-encoding" in given)


READ = frozenset(
    (
        b"authorization",
        b"connection",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"expect",
        b"host",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""The headers that are kept in `Request.given`."""
_ONCE = frozenset((b"authorization", b"content-encoding", b"content-length", b"content-type", b"host"))


def add(request: Request, name: bytes, value: bytes) -> str:
    """One more header. What is wrong with it, "" if nothing."""
    size = len(name) + len(value)
    request.size += size + 4
    pairs = request.pairs
    pairs.append((name, value))
    if size > MAX_LINE or request.size > MAX_HEAD or len(pairs) > MAX_HEADERS:
        return f"its head is larger than {MAX_HEAD} bytes, {MAX_HEADERS} headers or {MAX_LINE} bytes in one of them"
    lower = name.lower()
    if lower in READ:
        given = request.given
        if lower in given:
            if lower in _ONCE:
                return f"two headers {lower.decode()}"
            value = given[lower] + b"," + value
        given[lower] = value
    return ""


def fault(request: Request, version: str) -> str:
    """Why a head that could be parsed is refused; "" if it is not. Sets the path."""
    given = request.given
    if version != "1.1" and version != "1.0":
        return "the version of HTTP is neither 1.1 nor 1.0"
    request.modern = version == "1.1"
    request.keep = request.keep and request.modern
    if b"transfer-encoding" in given and (not request.modern or given[b"transfer-encoding"].lower() != _CHUNKED):
        return "the only transfer coding is chunked, of HTTP/1.1"
    if request.modern and b"host" not in given:
        return "there is no host"
    if b"upgrade" in given or request.method == "CONNECT":
        return "no other protocol is spoken here"
    path = decoded(request.target)
    if path is None:
        return "the target is not a path"
    request.path = path
    return ""


def decoded(target: str) -> str | None:
    """The path of a request's target, None if it is none, or not one that all read alike."""
    if not target.startswith("/") or "#" in target:
        return None
    path = target.partition("?")[0]
    if "%" not in path:
        return path
    try:
        return unquote(path, errors="strict")
    except UnicodeDecodeError:
        return None


def canonical(request: Request) -> str:
    """The target with its path written in the one way in which an engine cannot read it as another."""
    raw, mark, query = request.target.partition("?")
    return (raw if raw == request.path else quote(request.path, safe="/:@!$&'()*+,;=~-._")) + mark + query
