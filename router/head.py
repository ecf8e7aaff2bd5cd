"""The head of a client's request: what is refused although a parser takes it, and what the router reads in it. Pure.

The parser turns away what no two readers agree on: two lengths, a length beside chunks, line ends and spaces where none
belong. Here are the rest, and the limits that it does not have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from deeplink.errors import InvalidRequest
from deeplink.router.exchange import GENERATING
from deeplink.router.names import Names

if TYPE_CHECKING:
    from deeplink.router.exchange import Outgoing

MAX_HEAD = 64 << 10
"""Bytes of a request's head, and of what frames its chunks beyond what that takes."""
MAX_LINE = 8190
"""Bytes of its target, and of one header."""
MAX_HEADERS = 256

_CHUNKED = b"chunked"
_PLAIN = frozenset(GENERATING)
"""Targets that need no reading."""
_MORE = (b"connection", b"expect", b"transfer-encoding", b"upgrade")
"""Those of `Head.given` that may come several times."""
_READ = Names(
    {
        name.decode(): name
        for name in (*_MORE, b"authorization", b"content-encoding", b"content-length", b"content-type", b"host")
    },
    b"",
)


@dataclass(slots=True, eq=False)
class Head:
    """That of a request as it arrived. `target` is as it was sent, `path` decoded and without the query; `pairs` are
    all headers, names as they were sent; `given` those about the request itself, by their names in lower case.
    `modern`: its answer may come in chunks; `keep`: others may follow on its connection. `limit` is how many bytes of
    body it may have, `outgoing` what engines get of it, once that was asked for. Not to be changed: it may be that of
    many requests."""

    method: str
    target: str
    path: str
    pairs: list[tuple[bytes, bytes]]
    given: dict[bytes, bytes]
    modern: bool
    keep: bool
    limit: int = 0
    outgoing: Outgoing | None = None

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

    @property
    def repeats(self) -> bool:
        """Whether all that is here is so for any request whose head differs only in its length."""
        given = self.given
        return b"content-length" in given and b"transfer-encoding" not in given and b"expect" not in given

    def unsized(self) -> Head:
        """The same, of a request of another length."""
        pairs = [pair for pair in self.pairs if _READ[pair[0]] != b"content-length"]
        given = {name: value for name, value in self.given.items() if name != b"content-length"}
        return replace(self, pairs=pairs, given=given)


def read(method: str, target: str, pairs: list[tuple[bytes, bytes]], version: str, keep: bool) -> Head:
    """Raises InvalidRequest for what is refused although it could be parsed."""
    given: dict[bytes, bytes] = {}
    count = 0
    for name, value in pairs:
        if known := _READ[name]:
            given[known] = value
            count += 1
    if count != len(given):
        given = _joined(pairs)
    modern = version == "1.1"
    if not modern and version != "1.0":
        raise InvalidRequest("the version of HTTP is neither 1.1 nor 1.0")
    if b"transfer-encoding" in given and (not modern or given[b"transfer-encoding"].lower() != _CHUNKED):
        raise InvalidRequest("the only transfer coding is chunked, of HTTP/1.1")
    if modern and b"host" not in given:
        raise InvalidRequest("there is no host")
    if b"upgrade" in given or method == "CONNECT":
        raise InvalidRequest("no other protocol is spoken here")
    path = target if target in _PLAIN else decoded(target)
    if path is None:
        raise InvalidRequest("the target is not a path")
    return Head(method, target, path, pairs, given, modern, keep and modern)


def _joined(pairs: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """What several headers of one name say together. Raises InvalidRequest for one that may come only once."""
    given: dict[bytes, bytes] = {}
    for name, value in pairs:
        if known := _READ[name]:
            if known in given:
                if known not in _MORE:
                    raise InvalidRequest(f"there are two headers {known.decode()}")
                value = given[known] + b"," + value
            given[known] = value
    return given


def too_large(target: bytes, pairs: list[tuple[bytes, bytes]]) -> str:
    """What is too large in a head; "" if nothing is."""
    if len(target) > MAX_LINE:
        return f"the target is longer than {MAX_LINE} bytes"
    sizes = [len(name) + len(value) for name, value in pairs]
    if len(sizes) > MAX_HEADERS:
        return f"there are more than {MAX_HEADERS} headers"
    if max(sizes, default=0) > MAX_LINE:
        return f"a header is longer than {MAX_LINE} bytes"
    return f"the head is longer than {MAX_HEAD} bytes" if sum(sizes) > MAX_HEAD else ""


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


def canonical(head: Head) -> str:
    """The target with its path written in the one way in which an engine cannot read it as another."""
    if head.target == head.path:
        return head.path
    raw, mark, query = head.target.partition("?")
    return (raw if raw == head.path else quote(head.path, safe="/:@!$&'()*+,;=~-._")) + mark + query
