"""An engine's KV cache as kvconnector sees it: flat arrays, and what their elements mean.

`Cache` is one in host memory; `deeplink.kvconnector.caches.device_cache.DeviceCache` is one in a device's, whose arrays
are torch tensors. What a `Group` needs of either are the methods here, and it does not know which it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.kvconnector.layouts.layout import Bound
from deeplink.kvconnector.relayout import convert
from deeplink.kvconnector.relayout.plan import Chunk


@dataclass(frozen=True, slots=True)
class Cache:
    """`layers` has one flat array per layer, or for a layout with several tensors those of layer 0, of layer 1, ….

    The arrays stay the engine's; they are views of its memory, valid as long as the engine runs.
    """

    layers: tuple[npt.NDArray[Any], ...]
    bound: Bound
    _checked: list[convert.Blocks] = field(default_factory=list, init=False, repr=False, compare=False)
    """What was found of the arrays, once they were used."""

    @property
    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = self.layers[0].dtype
        return dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token on the wire, all layers."""
        bound = self.bound
        return self.depth * bound.kv * bound.heads * bound.head_dim * self.dtype.itemsize

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers) // self.bound.tensors

    def part(self, layers: Sequence[int], heads: tuple[int, int]) -> Cache:
        """The same memory, seen through these layers (counted in this cache) and heads ``[start, stop)`` alone."""
        tensors = self.bound.tensors
        arrays = tuple(array for at in layers for array in self.layers[at * tensors : (at + 1) * tensors])
        return replace(self, layers=arrays, bound=self.bound.only(*heads))

    def as_of_now(self) -> Cache:
        """The same memory, whose blocks a later `scatter` writes to only after whatever the calling thread has put on
        their device by now. In host memory that has been done already: who calls has done it."""
        return self

    def wire_shape(self, tokens: int) -> tuple[int, ...]:
        return convert.wire_shape(self.bound, self.depth, tokens)

    def gather(self, table: Sequence[int], chunk: Chunk, wire_LSHTD: npt.NDArray[Any]) -> None:
        """Copy the chunk's tokens out of the blocks; done when it returns. The caller vouches that nobody writes to
        them, and that what has is done, or on a device, on the calling thread's current stream."""
        convert.copy_chunk(self._blocks(wire_LSHTD), table, chunk, chunk.start, wire_LSHTD, "wire")

    def scatter(self, wire_LSHTD: npt.NDArray[Any], origin: int, table: Sequence[int], chunk: Chunk) -> None:
        """Copy the chunk's tokens into the blocks; done when it returns. The wire begins at token `origin`; the caller
        owns the blocks."""
        convert.copy_chunk(self._blocks(wire_LSHTD), table, chunk, origin, wire_LSHTD, "blocks")

    def _blocks(self, wire_LSHTD: npt.NDArray[Any]) -> convert.Blocks:
        if not self._checked:
            self._checked.append(convert.Blocks.of(self.layers, self.bound, wire_LSHTD.dtype))
        return self._checked[0]
