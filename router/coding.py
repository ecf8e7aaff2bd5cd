"""Bodies that clients send compressed. Pure; bounded by what they hold, not by what they take."""

from __future__ import annotations

import zlib

from deeplink.errors import InvalidRequest, RequestTooLarge

_GZIP, _ZLIB, _RAW = 31, 15, -15
_HEADED = 0x8
"""The low half of the first byte of what begins with a head of zlib's."""


def plain(body: bytes, coding: str, limit: int) -> bytes:
    """The body without its coding. Raises RequestTooLarge past `limit` bytes, InvalidRequest for a coding that is not
    known or does not fit."""
    if not body or coding in ("", "identity"):
        return body
    if coding in ("gzip", "x-gzip"):
        window = _GZIP
    elif coding == "deflate":  # some send it without the head that it should have
        window = _ZLIB if body[:1] and body[0] & 0xF == _HEADED else _RAW
    else:
        raise InvalidRequest(
            "the request body has a coding that is not known", field="content-encoding", ours="gzip, deflate"
        )
    reader = zlib.decompressobj(window)
    try:
        data = reader.decompress(body, limit + 1)
    except zlib.error as exc:
        raise InvalidRequest("the request body is not what its content-encoding says") from exc
    if len(data) > limit:
        raise RequestTooLarge(f"the request body is larger than {limit} bytes once it is unpacked")
    if not reader.eof or reader.unused_data:
        raise InvalidRequest("the request body is not what its content-encoding says")
    return data
