"""The body of an HTTP answer, within a size and a time."""

from __future__ import annotations

import http.client
import time


def read(response: http.client.HTTPResponse, limit: int, deadline: float) -> bytes:
    """At most `limit` + 1 bytes, so that whoever wants no more than `limit` sees that there were. Raises TimeoutError
    when not all of it has come by `deadline`, of time.monotonic(); each single wait is the connection's to bound.

    The timeout of http.client starts anew with every piece, so a peer that sends a byte now and then would never end.
    """
    content = bytearray()
    while len(content) <= limit and (piece := response.read1(limit + 1 - len(content))):
        content += piece
        if time.monotonic() > deadline:
            raise TimeoutError("not all of the answer came in time")
    return bytes(content)
