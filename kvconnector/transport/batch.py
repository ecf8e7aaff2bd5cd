"""What goes over one stream of the embedded transport: batches of parts, each with checksums.

    count      uint16; 0 asks for an answer and has no parts
    checksum   uint64 of the count and the parts
    parts      key (16 bytes), offset, length (uint64) of each
    bytes      of all parts, one after another, and then their checksum; not when count is 0

Checksums are xxh3_64, little-endian like everything here. A part that was changed on its way would be written to the
wrong place, so the parts are checked before their bytes are taken. The bytes are checked in windows, right before the
kernel takes them or after it gave them, when they are in the core's cache: 113 GB/s, against 33 from memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

import xxhash

from deeplink.kvconnector.transport.base import Push
from deeplink.kvconnector.transport.regions import Part

MAX_PARTS = 512
WINDOW = 256 << 10

HEAD = struct.Struct("<HQ")
PART = struct.Struct("<16sQQ")
SUM = struct.Struct("<Q")
_COUNT = struct.Struct("<H")


def cut(pushes: Iterable[Push], size: int) -> Iterator[list[Push]]:
    """The same bytes to the same places in batches of at most `size` bytes; large pushes are cut."""
    batch: list[Push] = []
    room = size
    for push in pushes:
        whole = push.source
        if whole.nbytes < room and whole.itemsize == whole.ndim == 1 and len(batch) < MAX_PARTS - 1:
            batch.append(push)
            room -= whole.nbytes
            continue
        source = whole.cast("B")
        done = 0
        while True:
            piece = source[done : done + room]
            batch.append(Push(piece, push.key, push.offset + done))
            done, room = done + piece.nbytes, room - piece.nbytes
            if not room or len(batch) == MAX_PARTS:
                yield batch
                batch, room = [], size
            if done == source.nbytes:
                break
    if batch:
        yield batch


def pack(batch: Sequence[Push]) -> bytes:
    """What comes before the bytes of a batch; for none, the request for an answer.

    Pushes that go to adjacent places are one part, wherever they come from: some heads of a chunk are many pieces here
    and one there.
    """
    found: list[tuple[bytes, int, int]] = []
    key, stop = None, 0
    for push in batch:
        length = push.source.nbytes
        if push.key == key and push.offset == stop:
            _, offset, before = found[-1]
            found[-1] = push.key, offset, before + length
        else:
            found.append((push.key, push.offset, length))
        key, stop = push.key, push.offset + length
    parts = b"".join([PART.pack(*part) for part in found])
    return HEAD.pack(len(found), head_sum(len(found), parts)) + parts


def unpack(parts: bytes) -> list[Part]:
    return list(PART.iter_unpack(parts))


def head_sum(count: int, parts: bytes) -> int:
    return xxhash.xxh3_64_intdigest(_COUNT.pack(count) + parts)


def windows(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes in lists of at most WINDOW bytes."""
    window: list[memoryview] = []
    room = WINDOW
    for view in views:
        if 0 < view.nbytes < room:
            window.append(view)
            room -= view.nbytes
            continue
        while view:
            window.append(view[:room])
            view, room = view[room:], room - window[-1].nbytes
            if not room:
                yield window
                window, room = [], WINDOW
    if window:
        yield window
