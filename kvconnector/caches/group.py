"""One cache group as one rank holds it, and its chunks in staging.

A chunk in staging is the rank's whole share of the group for some tokens: the scales first, if there are any for each
token and head, then the elements, both ``[layer, kv, head, token, dim]``. A source may hold more than a target takes;
what the target takes is, for each layer and for K and V, one run of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.errors import LayoutError
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.contracts.contract import CacheGroup
from deeplink.kvconnector.contracts.forms import SCHEMES, TOKEN_HEAD
from deeplink.kvconnector.contracts.negotiate import SLIDING, STATE
from deeplink.kvconnector.relayout import digest
from deeplink.kvconnector.relayout.convert import storage_dtype
from deeplink.kvconnector.relayout.plan import TILE, Chunk, consecutive
from deeplink.kvconnector.relayout.recast import Constants, Packed, constants, recast

Elements = npt.NDArray[Any]
Range = tuple[int, int]
_SCALE = np.dtype(np.float32)
SCALES_AT = 1 << 15
"""Added to a layer's number for the digests of its scales, so that they are not taken for those of its elements."""


@dataclass(frozen=True, slots=True)
class Wire:
    """The form of a chunk: `dtype` elements of some layers (numbered as in the whole model) and heads."""

    dtype: str
    layers: tuple[int, ...]
    kv: int
    heads: Range
    dim: int

    @property
    def vectors(self) -> int:
        """Vectors per token."""
        return len(self.layers) * self.kv * (self.heads[1] - self.heads[0])

    @property
    def token_bytes(self) -> int:
        return self.vectors * (self.dim * storage_dtype(self.dtype).itemsize + self._scale_bytes)

    @property
    def _scale_bytes(self) -> int:
        return _SCALE.itemsize if SCHEMES.get(self.dtype) == TOKEN_HEAD else 0

    def length(self, tokens: int) -> int:
        return tokens * self.token_bytes

    def elements(self, memory: memoryview, tokens: int) -> Elements:
        """The elements of a chunk in this form, as integers of their size."""
        at = tokens * self.vectors * self._scale_bytes
        return np.frombuffer(memory[at:], storage_dtype(self.dtype)).reshape(self._shape(tokens, self.dim))

    def scales(self, memory: memoryview, tokens: int) -> npt.NDArray[np.float32] | None:
        if not self._scale_bytes:
            return None
        at = tokens * self.vectors * self._scale_bytes
        return np.frombuffer(memory[:at], np.float32).reshape(self._shape(tokens, 1))

    def constants(self, producer: CacheGroup) -> npt.NDArray[np.float64]:
        """The producer's scales for these layers; 1 where it has cast to a type that it has none for."""
        scales = producer.scales if producer.dtype == self.dtype else None
        return constants(scales, producer.layers, self.layers, self.kv)

    def part(self, layers: Sequence[int], heads: Range) -> Wire:
        return Wire(self.dtype, tuple(layers), self.kv, heads, self.dim)

    def pieces(self, part: Wire, tokens: int) -> tuple[Range, ...]:
        """Where a part's bytes are in a chunk of this form, in the part's own order; adjacent pieces are one."""
        return _pieces(self, part, tokens)

    def digests(self, chunk: Chunk, memory: memoryview, sample: digest.Sample = digest.ALL) -> digest.Tiles:
        """Those of the elements and then, if there are any, of the scales: ``[layer (of both), kv, head, tile]``; 0 for
        a tile that is not in the sample."""
        planes = [(self.elements(memory, chunk.tokens), 0), (self.scales(memory, chunk.tokens), SCALES_AT)]
        return np.concatenate(
            [
                digest.tiles(chunk, plane[first : first + count], layer + offset, self.heads[0], sample=sample)
                for plane, offset in planes
                if plane is not None
                for first, layer, count in consecutive(self.layers)
            ]
        )

    def part_of(self, digests: digest.Tiles, part: Wire) -> digest.Tiles:
        """The digests of a part, from those of this form."""
        start, stop = (edge - self.heads[0] for edge in part.heads)
        places = [self.layers.index(layer) for layer in part.layers]
        planes = range(0, digests.shape[0], len(self.layers))
        return digests[[plane + place for plane in planes for place in places], :, start:stop]

    def _shape(self, tokens: int, dim: int) -> tuple[int, ...]:
        return len(self.layers), self.kv, self.heads[1] - self.heads[0], tokens, dim


@lru_cache(maxsize=1024)
def _pieces(form: Wire, part: Wire, tokens: int) -> tuple[Range, ...]:
    pieces: list[Range] = []
    row = 0
    for size in (form._scale_bytes, form.dim * storage_dtype(form.dtype).itemsize):
        head = tokens * size
        width = (form.heads[1] - form.heads[0]) * head
        start, stop = ((edge - form.heads[0]) * head for edge in part.heads)
        for layer in part.layers if size else ():
            for side in range(form.kv):
                at = row + (form.layers.index(layer) * form.kv + side) * width
                if pieces and pieces[-1][1] == at + start:
                    pieces[-1] = pieces[-1][0], at + stop
                else:
                    pieces.append((at + start, at + stop))
        row += tokens * form.vectors * size
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class Group:
    """`layers` are the numbers of the layers this rank holds, in the order of its arrays, and `heads` those of its
    heads. `scales` has the scales of `values`, where each token and head has its own. The arrays stay the engine's."""

    spec: CacheGroup
    layers: tuple[int, ...]
    heads: Range
    values: Cache
    scales: Cache | None = None

    def __post_init__(self) -> None:
        caches = [self.values, *([self.scales] if self.scales else [])]
        if any(c.depth != len(self.layers) or c.bound.heads != self.heads[1] - self.heads[0] for c in caches):
            raise LayoutError(
                f"a cache that has not the layers {self.layers} and heads {self.heads} it is said to have"
            )
        if (self.scales is not None) != (SCHEMES.get(self.spec.dtype) == TOKEN_HEAD):
            raise LayoutError(f"a cache of {self.spec.dtype} with or without scales, against its type", field="scales")

    def wire(self, dtype: str = "") -> Wire:
        """The form in which all that this rank has of the group is staged."""
        bound = self.values.bound
        return Wire(dtype or self.spec.dtype, self.layers, bound.kv, self.heads, bound.head_dim)

    def offered(self, tokens: int) -> Range:
        """Which tokens of a prompt are handed over: a sliding window drops the others, a state is one record, and a
        rank may have no layer of the group."""
        if not self.layers:
            return 0, 0
        if self.spec.kind == STATE:
            return 0, 1
        if self.spec.kind == SLIDING:
            return max(0, tokens - self.spec.window) // TILE * TILE, tokens
        return 0, tokens

    def wanted(self, start: int, stop: int) -> Range:
        """Which tokens are needed to go on at token `stop`, when those before `start` are there; empty if none."""
        if self.spec.kind == STATE:
            return 0, min(1, stop - start)
        if self.spec.kind == SLIDING:
            return max(start, min(stop, stop + 1 - self.spec.window)), stop
        return start, stop

    def as_of_now(self) -> Group:
        """The same group, to land in after whatever the calling thread has put on a device by now."""
        scales = self.scales.as_of_now() if self.scales is not None else None
        return replace(self, values=self.values.as_of_now(), scales=scales)

    def stage(self, table: Sequence[int], chunk: Chunk, memory: memoryview, dtype: str) -> None:
        """Copy the chunk's tokens out of the blocks, cast to `dtype`; done when it returns. The caller vouches that
        nobody writes to them: what has is done, or on a device, on the calling thread's current stream."""
        wire = self.wire(dtype)
        if dtype == self.spec.dtype:
            self.values.gather(table, chunk, wire.elements(memory, chunk.tokens))
            if self.scales is not None and (scales := wire.scales(memory, chunk.tokens)) is not None:
                self.scales.gather(table, chunk, scales.view(self.scales.dtype))
            return
        own = np.empty(self.values.wire_shape(chunk.tokens), self.values.dtype)
        self.values.gather(table, chunk, own)
        source = Packed(self.spec.dtype, own, constants(self.spec.scales, self.spec.layers, self.layers, wire.kv))
        target = Packed(dtype, wire.elements(memory, chunk.tokens), token_scales=wire.scales(memory, chunk.tokens))
        recast(source, target, self.layers, self.heads[0], chunk.start)

    def land(
        self, wire: Wire, memory: memoryview, producer: CacheGroup, arrived: Chunk, table: Sequence[int], chunk: Chunk
    ) -> None:
        """As `Entrance.land`, of one chunk."""
        self.entrance(wire, producer).land(memory, arrived, table, chunk)

    def entrance(self, wire: Wire, producer: CacheGroup) -> Entrance:
        """For chunks in form `wire`, which come from the group `producer`."""
        places = [self.layers.index(layer) for layer in wire.layers]
        heads = wire.heads[0] - self.heads[0], wire.heads[1] - self.heads[0]
        scales = self.scales.part(places, heads) if self.scales is not None else None
        given = wire.constants(producer)
        own = constants(self.spec.scales, self.spec.layers, wire.layers, wire.kv)
        same = wire.dtype == self.spec.dtype and np.array_equal(given, own)
        return Entrance(wire, self.spec.dtype, self.values.part(places, heads), scales, given, own, same)


@dataclass(frozen=True, slots=True)
class Entrance:
    """The way of chunks in form `wire` into a group's blocks, of which these are the layers and heads that it has.

    `given` and `own` are the scales of the two sides, and `same` says that the bytes need no cast.
    """

    wire: Wire
    dtype: str
    values: Cache
    scales: Cache | None
    given: Constants
    own: Constants
    same: bool

    def land(self, memory: memoryview, arrived: Chunk, table: Sequence[int], chunk: Chunk) -> None:
        """Copy tokens `chunk` of what has `arrived` into the blocks, cast to the group's own type.

        The caller owns the blocks, and on a device whatever is under way on them was put there before `as_of_now`. The
        tokens are in their blocks when it returns.
        """
        wire, tokens = self.wire, arrived.tokens
        elements, scales = wire.elements(memory, tokens), wire.scales(memory, tokens)
        if not self.same:
            source = Packed(wire.dtype, elements, self.given, scales)
            target = Packed(self.dtype, np.empty(self.values.wire_shape(tokens), self.values.dtype), self.own)
            if self.scales is not None:
                target = replace(target, token_scales=np.empty(self.scales.wire_shape(tokens), np.float32))
            recast(source, target, wire.layers, wire.heads[0], arrived.start)
            elements, scales = target.elements, target.token_scales
        self.values.scatter(elements, arrived.start, table, chunk)
        if self.scales is not None and scales is not None:
            self.scales.scatter(scales.view(self.scales.dtype), arrived.start, table, chunk)
