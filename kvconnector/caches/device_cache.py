"""A KV cache whose arrays are torch tensors, on whatever device torch knows.

A device does its work later, so it matters who comes after whom. Staging is asked for on the engine's own thread, after
the forward pass was put on that thread's current stream: a gather waits there, and returns when the bytes are in host
staging. Landing is done by other threads, into blocks that the engine has given away but may still have work under way
on (a step that was launched before, for the request that had them last): so a load marks the engine's stream when the
engine orders it, on the engine's thread, and everything that lands waits for the mark, on a stream of its own. A
scatter returns when the blocks hold the tokens, so what the engine launches once it has heard of the end sees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from deeplink.errors import LayoutError
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.layouts.layout import Bound
from deeplink.kvconnector.relayout import device
from deeplink.kvconnector.relayout.convert import STORAGE
from deeplink.kvconnector.relayout.plan import Chunk, runs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeviceCache(Cache):
    """`layers` has flat tensors of one device, whose first element is element 0 of block 0. They stay the engine's.

    `after` is a mark on the device that writes to the blocks wait for; None for what is on the writer's own current
    stream.
    """

    layers: tuple[Tensor, ...]
    after: Any = None

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(STORAGE[self.layers[0].element_size()])

    def as_of_now(self) -> DeviceCache:
        return replace(self, after=device.mark(self.layers[0].device)) if self.layers else self

    def gather(self, table: Sequence[int], chunk: Chunk, wire_LSHTD: npt.NDArray[Any]) -> None:
        device.gather(self.layers, self.bound, runs(table, self.bound.block_size, chunk), wire_LSHTD)

    def scatter(self, wire_LSHTD: npt.NDArray[Any], origin: int, table: Sequence[int], chunk: Chunk) -> None:
        where = runs(table, self.bound.block_size, chunk, origin)
        device.scatter(wire_LSHTD, self.bound, where, self.layers, self.after)


def of_tensors(tensors: Sequence[Tensor], bound: Bound) -> Cache:
    """The cache that these tensors are: those of layer 0, of layer 1, …, each of any shape, as the engine has it.

    `bound` counts from a tensor's first element in memory, whatever order its axes are in. In host memory it is a
    `Cache` of the same bytes, which compiled loops can read. Raises LayoutError where the tensors are fewer, smaller,
    of unlike elements or on several devices, or where the device cannot say when a copy is done.
    """
    if len(tensors) % bound.tensors:
        raise LayoutError(f"{len(tensors)} tensors for layers that have {bound.tensors} each", field="layers")
    flat = tuple(_flat(tensor) for tensor in tensors)
    if flat and flat[0].element_size() not in STORAGE:
        raise LayoutError(f"a cache of {flat[0].dtype}", field="dtype", ours=f"elements of {[*STORAGE]} bytes")
    for place, tensor in enumerate(flat):
        if tensor.device != flat[0].device or tensor.element_size() != flat[0].element_size():
            raise LayoutError(
                "the tensors of one cache are on several devices, or have unlike elements",
                field="device",
                ours=f"{flat[0].dtype} on {flat[0].device}",
                theirs=f"{tensor.dtype} on {tensor.device}",
                remedy="make a cache group of each kind",
            )
        needed = bound.elements(place % bound.tensors)
        if tensor.numel() < needed:
            raise LayoutError(
                f"tensor {place} of a cache is smaller than its layout says",
                field="shape",
                ours=f"{needed} elements",
                theirs=f"{tensor.numel()} elements",
            )
    if not flat or flat[0].device.type in device.HOST:
        return Cache(tuple(device.array(tensor) for tensor in flat), bound)
    device.runtime(flat[0].device)
    return DeviceCache(flat, bound)


def _flat(tensor: Tensor) -> Tensor:
    """All of the memory that a tensor spans."""
    places = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((extent - 1) * stride for extent, stride in places) if tensor.numel() else 0
    return tensor.detach().as_strided((span,), (1,))


def host_array(name: str, tensor: Tensor, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """All elements of a tensor in host memory in a row, as integers; a view. Raises LayoutError, naming it, for one on
    another device, of another shape, or with anything between its elements."""
    if tensor.device.type not in device.HOST:
        raise LayoutError(f"{name} is in {tensor.device} memory; this release reads host memory", field="device")
    if tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise LayoutError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}",
            field="strides",
            ours=f"{shape}, dense",
            theirs=str(tensor.stride()),
        )
    return device.array(tensor.view(-1))
