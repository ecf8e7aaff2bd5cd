"""What the bytes of a stored prefix mean. Entries are shared only within one space."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import msgspec

from deeplink.errors import ConfigError, ProtocolError
from deeplink.kvconnector.contracts.contract import CacheGroup, Model
from deeplink.kvconnector.contracts.negotiate import FULL
from deeplink.kvconnector.layouts.layout import Layout

FORM = 1
"""Of names, entries and digests. Raise it with any change to what they are made of."""
MAX_BYTES = 64 << 10


class Space(msgspec.Struct, frozen=True):
    """Everything of an engine's contract that decides what one unit's bytes mean: `kv` is 2, or 1 for a cache with one
    vector a token, and `unit` is in tokens. Page size and layout are not in it: entries are in the wire form."""

    model: Model
    layers: tuple[int, ...]
    kv: int
    heads: int
    head_dim: int
    dtype: str
    unit: int
    form: int = FORM

    @property
    def key(self) -> str:
        """32 hexadecimal digits; equal only for equal spaces."""
        return blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Of one unit, ``[layer, kv, head, token, dim]``."""
        return len(self.layers), self.kv, self.heads, self.unit, self.head_dim


def of_group(model: Model, group: CacheGroup, unit: int) -> Space:
    """Raises ConfigError, naming the field, for a cache whose prefixes are not stored by this release."""
    for field, value, accepted in (("kind", group.kind, FULL), ("scales", str(group.scales or "none"), "none")):
        if value != accepted:
            raise ConfigError(
                "prefixes of such a cache are not stored by this release", field=field, ours=value, theirs=accepted
            )
    bound = Layout.parse(group.layout).bind(heads=group.heads, head_dim=group.head_dim, block_size=group.block_size)
    return Space(model, group.layers, bound.kv, group.heads, group.head_dim, group.dtype, unit)


def encode(space: Space) -> bytes:
    return msgspec.json.format(msgspec.json.encode(space), indent=2)


def decode(data: bytes) -> Space:
    """What `encode` wrote. Raises ProtocolError for anything else."""
    try:
        return msgspec.json.decode(data, type=Space)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ProtocolError(f"not a space: {exc}") from exc


def differences(ours: Space, theirs: Space) -> Iterator[tuple[str, str, str]]:
    """The fields in which two spaces differ, with both values."""
    for name in ours.model.__struct_fields__:
        yield from _unequal(f"model.{name}", getattr(ours.model, name), getattr(theirs.model, name))
    for name in ours.__struct_fields__:
        if name != "model":
            yield from _unequal(name, getattr(ours, name), getattr(theirs, name))


def _unequal(field: str, ours: object, theirs: object) -> Iterator[tuple[str, str, str]]:
    if ours != theirs:
        yield field, str(ours), str(theirs)
