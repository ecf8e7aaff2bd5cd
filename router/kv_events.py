"""What engines publish about their caches: batches of events in msgpack, as vLLM and SGLang write them. Pure.

An event is a map with its kind as `type`, or, from older releases, an array that begins with it; both are read. The
bytes come from the network, so sizes are bounded, and members that are not known are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from deeplink.errors import ProtocolError

MAX_BATCH = 16 << 20
MAX_EVENTS = 1 << 16
MAX_BLOCK = 1 << 12
"""Tokens of one block."""
HERE = (None, "GPU", "gpu", "DEVICE", "device")
"""How engines call the memory that attention reads; blocks elsewhere are slower to have, and not counted."""

Hash = int | bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that follow one another, after `parent` (None: at a prompt's beginning). `keyed`: they belong to prompts
    with something beside their tokens, such as an adapter or a picture."""

    blocks: tuple[Hash, ...]
    parent: Hash | None
    tokens: tuple[int, ...]
    size: int
    keyed: bool


@dataclass(frozen=True, slots=True)
class Removed:
    blocks: tuple[Hash, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """All blocks are gone."""


Event = Stored | Removed | Cleared
_ARRAYS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""What the places after the kind mean; later ones are not needed."""


def decode(data: bytes) -> list[Event]:
    """The events of one batch, in their order; of other kinds, groups and memories they are left out.

    Raises ProtocolError for what is no batch, or one beyond the limits.
    """
    if len(data) > MAX_BATCH:
        raise ProtocolError("a batch of cache events is too large", field="size", theirs=str(len(data)))
    try:
        batch = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as exc:
        raise ProtocolError("a batch of cache events is not msgpack", field="batch") from exc
    events = batch[1] if isinstance(batch, list) and len(batch) >= 2 else None
    if not isinstance(events, list) or len(events) > MAX_EVENTS:
        raise ProtocolError("a batch of cache events has no list of events, or too long a one", field="events")
    return [event for item in events if (event := _event(item)) is not None]


def _event(item: Any) -> Event | None:
    if isinstance(item, list) and item and isinstance(item[0], str):
        item = {"type": item[0], **dict(zip(_ARRAYS.get(item[0], ()), item[1:], strict=False))}
    if not isinstance(item, dict):
        raise ProtocolError("a cache event is neither a map nor an array", field="event")
    kind = item.get("type")
    if kind == "AllBlocksCleared":
        return Cleared()
    if kind not in ("BlockStored", "BlockRemoved"):
        return None
    # Other groups (windows, states) hold other parts of the same prompts; the first has all of it.
    if item.get("medium") not in HERE or item.get("group_idx") not in (None, 0):
        return None
    blocks = item.get("block_hashes")
    if not isinstance(blocks, list) or not all(_is_hash(block) for block in blocks):
        raise ProtocolError("a cache event's block hashes are not numbers or bytes", field="block_hashes")
    if kind == "BlockRemoved":
        return Removed(tuple(blocks))
    return _stored(item, blocks)


def _stored(item: dict[Any, Any], blocks: Sequence[Hash]) -> Stored:
    parent, tokens, size = item.get("parent_block_hash"), item.get("token_ids"), item.get("block_size")
    if parent is not None and not _is_hash(parent):
        raise ProtocolError("a cache event's parent is not a number or bytes", field="parent_block_hash")
    if type(size) is not int or not 0 < size <= MAX_BLOCK:
        raise ProtocolError("a cache event has no usable block size", field="block_size", theirs=str(size)[:100])
    if not isinstance(tokens, list) or len(tokens) != size * len(blocks):
        raise ProtocolError("a cache event has more or fewer tokens than its blocks", field="token_ids")
    if not all(type(token) is int and 0 <= token < 1 << 32 for token in tokens):
        raise ProtocolError("a cache event's token ids are not numbers of 32 bits", field="token_ids")
    extra = item.get("extra_keys")
    keyed = (
        item.get("lora_id") is not None
        or item.get("lora_name") is not None
        or (isinstance(extra, list) and any(keys for keys in extra))
    )
    return Stored(tuple(blocks), parent, tuple(tokens), size, keyed)


def _is_hash(value: Any) -> bool:
    return type(value) is int or (isinstance(value, bytes) and len(value) <= 64)
