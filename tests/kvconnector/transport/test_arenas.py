"""Libraries are told of memory once, whoever uses it."""

from __future__ import annotations

import pytest

from deeplink.errors import HandoffError
from deeplink.kvconnector.transport.arenas import Arenas
from deeplink.kvconnector.transport.pieces import address


class Book:
    """What is registered. Takes no overlap, as some libraries do not."""

    def __init__(self) -> None:
        self.ranges: set[tuple[int, int]] = set()

    def register(self, start: int, length: int) -> tuple[int, int]:
        if any(start < other + size and other < start + length for other, size in self.ranges):
            raise HandoffError("overlap")
        self.ranges.add((start, length))
        return start, length

    def unregister(self, registration: tuple[int, int]) -> None:
        self.ranges.remove(registration)


@pytest.fixture
def book() -> Book:
    return Book()


@pytest.fixture
def arenas(book: Book) -> Arenas:
    return Arenas(book.register, book.unregister)


def test_what_lies_within_an_arena_is_not_registered_again(arenas: Arenas, book: Book) -> None:
    memory = bytearray(1000)
    arenas.stage(memoryview(memory))
    start = address(memoryview(memory))
    cover = arenas.use((start + 10, 990))
    assert book.ranges == {(start, 1000)}
    arenas.leave(cover)
    assert book.ranges == {(start, 1000)}
    arenas.close()
    assert book.ranges == set()


def test_other_memory_is_registered_while_it_is_used(arenas: Arenas, book: Book) -> None:
    first = arenas.use((1000, 100))
    version = arenas.version
    second = arenas.use((1050, 50))
    assert second is first
    assert arenas.version == version
    arenas.leave(first)
    assert book.ranges == {(1000, 100)}
    arenas.leave(second)
    assert book.ranges == set()
    arenas.use((1000, 100))
    assert arenas.version > version


def test_what_the_library_refuses_is_not_kept(arenas: Arenas, book: Book) -> None:
    arenas.use((1000, 100))
    with pytest.raises(HandoffError, match="overlap"):
        arenas.use((1050, 100))
    assert book.ranges == {(1000, 100)}
    arenas.close()
    assert book.ranges == set()


def test_leaving_after_the_end_does_nothing(arenas: Arenas, book: Book) -> None:
    cover = arenas.use((1000, 100))
    arenas.close()
    arenas.leave(cover)
    assert book.ranges == set()
