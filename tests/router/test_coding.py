"""Bodies that come compressed."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.errors import InvalidRequest, RequestTooLarge
from deeplink.router.coding import plain


def raw(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=-15)
    return made.compress(data) + made.flush()


CODINGS = [("gzip", gzip.compress), ("x-gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", raw)]


@given(st.binary(max_size=500), st.sampled_from(CODINGS), st.integers(-1, 1))
def test_it_is_what_it_was_or_too_large(data: bytes, coding: tuple[str, object], room: int) -> None:
    name, make = coding
    limit = max(0, len(data) + room)
    if len(data) <= limit:
        assert plain(make(data), name, limit) == data  # type: ignore[operator]
    else:
        with pytest.raises(RequestTooLarge):
            plain(make(data), name, limit)  # type: ignore[operator]


@given(st.binary(min_size=1, max_size=80), st.sampled_from([name for name, _ in CODINGS]))
def test_what_is_not_compressed_is_refused(data: bytes, name: str) -> None:
    try:
        plain(data, name, 1000)
    except (InvalidRequest, RequestTooLarge):
        return
    assert name == "deflate", "by chance"


def test_what_lacks_its_end_or_has_more_is_refused() -> None:
    whole = gzip.compress(b"{}" * 100)
    for wrong in (whole[:-1], whole + b"x", whole + whole):
        with pytest.raises(InvalidRequest):
            plain(wrong, "gzip", 1000)


def test_other_codings() -> None:
    assert plain(b"{}", "identity", 10) == b"{}"
    assert plain(b"", "br", 10) == b""
    for name in ("br", "zstd", "gzip, gzip"):
        with pytest.raises(InvalidRequest) as caught:
            plain(b"{}", name, 10)
        assert caught.value.field == "content-encoding"
