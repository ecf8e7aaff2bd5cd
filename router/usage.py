"""Which prompt tokens were cached, in the answer of a request that was handed over. Pure.

To the decode engine all that was handed over is cached; what the client wants to know is what the prefill engine found.
So this one member of the usage comes from there, and null stands for what the prefill engine does not say. An answer
in which nothing has to be changed keeps its bytes.
"""

from __future__ import annotations

import json
import re
from typing import Any

_MEMBER = "prompt_tokens_details"
_MARK = f'"{_MEMBER}"'.encode()
_DATA = re.compile(rb"(?m)^data: ?(\{.*\})(?=\r?$)")


def details(answer: bytes) -> dict[str, Any] | None:
    """What the prefill engine's answer says; None if it does not."""
    if _MARK not in answer:
        return None
    found = _usage(_parsed(answer)).get(_MEMBER)
    return found if isinstance(found, dict) else None


def merged(answer: bytes, ours: dict[str, Any] | None) -> bytes:
    """The decode engine's answer, or one event's data, with what the prefill engine said."""
    if _MARK not in answer:
        return answer
    value = _parsed(answer)
    usage = _usage(value)
    if usage.get(_MEMBER) in (None, ours):
        return answer
    usage[_MEMBER] = ours
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")


def merged_events(whole: bytes, ours: dict[str, Any] | None) -> bytes:
    """The same for whole events of a stream."""
    if _MARK not in whole:
        return whole
    return _DATA.sub(lambda match: match[0].replace(match[1], merged(match[1], ours)), whole)


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _usage(value: Any) -> dict[str, Any]:
    usage = value.get("usage") if isinstance(value, dict) else None
    return usage if isinstance(usage, dict) else {}
