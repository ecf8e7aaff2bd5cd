"""Which headers pass."""

from __future__ import annotations

from deeplink.router.headers import to_client, to_engine


def test_to_engine() -> None:
    headers = [
        ("Host", "a"),
        ("Authorization", "Bearer k"),
        ("Content-Type", "application/json"),
        ("Content-Length", "3"),
        ("Accept-Encoding", "gzip"),
        ("Connection", "close, X-Mine"),
        ("X-Mine", "1"),
        ("X-Deeplink-Path", "plain"),
        ("x-deeplink-anything", "1"),
        ("Transfer-Encoding", "chunked"),
        ("X-Request-Id", "r"),
        ("X-Other", "1"),
        ("X-Other", "2"),
    ]
    assert to_engine(headers) == [
        ("Authorization", "Bearer k"),
        ("Content-Type", "application/json"),
        ("X-Request-Id", "r"),
        ("X-Other", "1"),
        ("X-Other", "2"),
    ]


def test_to_client() -> None:
    headers = [("Content-Type", "a/b"), ("Retry-After", "3"), ("X-Deeplink-Path", "x"), ("Server", "y")]
    assert to_client(headers) == [("Content-Type", "a/b"), ("Retry-After", "3")]
