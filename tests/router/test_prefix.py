"""Which engine probably holds the beginning of a prompt."""

from __future__ import annotations

from deeplink.router.prefix import CHUNK, CHUNK_TOKENS, MAX_CHUNKS, START, Prefixes, hashes, start


def text(*chunks: str) -> bytes:
    return b"".join(chunk.encode() * CHUNK for chunk in chunks)


def test_chunks_are_named_by_all_before_them() -> None:
    one, other = hashes(text("a", "b", "c")), hashes(text("x", "b", "c"))
    assert len(one) == 3
    assert not set(one) & set(other)
    assert hashes(text("a", "b") + b"rest") == one[:2]
    assert hashes(b"short") == ()
    assert len(hashes(b"x" * CHUNK * (MAX_CHUNKS + 9))) == MAX_CHUNKS


def test_how_much_is_held() -> None:
    prefixes = Prefixes()
    prefixes.add("e", hashes(text("a", "b", "c")))
    assert prefixes.held("e", hashes(text("a", "b", "c", "d"))) == 3 * CHUNK_TOKENS
    assert prefixes.held("e", hashes(text("a", "x", "c"))) == CHUNK_TOKENS
    assert prefixes.held("e", hashes(text("x", "b", "c"))) == 0
    assert prefixes.held("other", hashes(text("a"))) == 0
    prefixes.forget("e")
    assert prefixes.held("e", hashes(text("a"))) == 0


def test_the_newest_are_kept_and_ends_go_before_beginnings() -> None:
    prefixes = Prefixes()
    prefixes.resize("e", 4 * CHUNK_TOKENS)
    prefixes.add("e", hashes(text("a", "b", "c")))
    prefixes.add("e", hashes(text("x", "y")))
    assert prefixes.held("e", hashes(text("a", "b", "c"))) == 2 * CHUNK_TOKENS
    prefixes.add("e", hashes(text("a")))
    prefixes.add("e", hashes(text("v", "w")))
    assert prefixes.held("e", hashes(text("a"))) == CHUNK_TOKENS
    assert prefixes.held("e", hashes(text("x", "y"))) == CHUNK_TOKENS


def test_what_stands_for_the_beginning() -> None:
    same = ["s"] * (START - 1)
    assert start(()) == 0
    assert start(hashes(text("a"))) != start(hashes(text("a", "b")))
    assert start(hashes(text(*same, "a"))) != start(hashes(text(*same, "b")))
    assert start(hashes(text(*same, "a", "x"))) == start(hashes(text(*same, "a", "y", "z")))
