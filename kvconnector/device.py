"""Re-layout of caches that are torch tensors, on whatever device torch knows: between their blocks and a wire chunk in
host memory.

The moves are those of `deeplink.kvconnector.convert`, done by the device as strided copies into (or out of) one layer
in wire form that lies there, which then crosses to the host as one piece. Elements are moved as integers, so any dtype
of the right size does. This is the one module of kvconnector that uses torch, and only when it is called: the engine
that has such tensors brings it.

Work is put on the device's current stream; the caller vouches that what writes the blocks comes before it there. When
a function returns, its copies are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from deeplink.errors import LayoutError
from deeplink.kvconnector.convert import wire_shape
from deeplink.kvconnector.layout import Bound
from deeplink.kvconnector.moves import Into, Move, checked, moves
from deeplink.kvconnector.plan import Run

if TYPE_CHECKING:
    from torch import Tensor

Elements = npt.NDArray[Any]

HOST = ("cpu",)
"""Devices whose memory is the host's, so that nothing has to cross."""


def gather(caches: Sequence[Tensor], bound: Bound, where: Iterable[Run], wire_LSHTD: Elements) -> None:
    """Blocks to wire, as `deeplink.kvconnector.convert.gather`; the flat caches are torch tensors of one device."""
    _copy(caches, bound, where, wire_LSHTD, "wire")


def scatter(wire_LSHTD: Elements, bound: Bound, where: Iterable[Run], caches: Sequence[Tensor]) -> None:
    """Wire to blocks. Writes the elements of these tokens and no others."""
    _copy(caches, bound, where, wire_LSHTD, "blocks")


def _copy(caches: Sequence[Tensor], bound: Bound, where: Iterable[Run], wire_LSHTD: Elements, into: Into) -> None:
    import torch

    _check(caches, bound, wire_LSHTD)
    if into == "wire" and not wire_LSHTD.flags.writeable:
        raise ValueError("the target of a copy is read-only")
    tokens, itemsize = wire_LSHTD.shape[3], wire_LSHTD.itemsize
    runs = checked(where, bound, tokens)
    if not runs or not caches:
        return
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[itemsize]
    host = _on_host(wire_LSHTD, integer)
    device = caches[0].device
    here = device.type in HOST
    # What the runs leave out of the wire is to stay as it is.
    partial = into == "blocks" or sum(run.count * run.tokens for run in runs) < tokens
    places = list(_places(runs, bound, itemsize, tokens, device))
    for layer, wire in enumerate(host):
        staged = wire if here else torch.empty(wire.shape, dtype=integer, device=device)
        if not here and partial:
            staged.copy_(wire)
        for move, indices, first in places:
            cache = caches[layer * bound.tensors + move.tensor].view(integer)
            _assign(cache, staged.view(-1), move, indices, first, bound.blocks, into)
        if not here and into == "wire":
            wire.copy_(staged)
    if not here:
        getattr(torch, device.type).synchronize(device)


Place = tuple[Move, Any, Run]
"""One move for blocks whose tokens follow each other: their numbers on the device, or None where one run says it."""


def _places(runs: list[Run], bound: Bound, itemsize: int, tokens: int, device: Any) -> Iterator[Place]:
    import torch

    for group in _groups(runs, bound.block_size):
        first = group[0]
        indices = None
        if len(group) > 1:
            numbers = [number for run in group for number in range(run.block, run.block + run.count)]
            indices = torch.tensor(numbers, dtype=torch.int64, device=device)
        for move in moves(bound, itemsize, tokens, first.first, first.tokens):
            yield move, indices, first


def _groups(runs: list[Run], block_size: int) -> Iterator[list[Run]]:
    """Runs of whole blocks whose tokens follow each other, together: one copy for all of them, not one for each."""
    group: list[Run] = []
    for run in runs:
        if group and not (
            run.tokens == group[-1].tokens == block_size and run.at == group[-1].at + group[-1].count * block_size
        ):
            yield group
            group = []
        group.append(run)
    if group:
        yield group


def _assign(cache: Tensor, wire: Tensor, move: Move, indices: Tensor | None, run: Run, blocks: int, into: Into) -> None:
    size = move.itemsize
    in_blocks, on_wire = move.each_block
    count = run.count if indices is None else indices.numel()
    extents = [extent for extent, _, _ in move.dimensions]
    wire_view = wire.as_strided(
        [count, *extents],
        [on_wire // size, *(stride // size for _, _, stride in move.dimensions)],
        wire.storage_offset() + (move.wire_offset + run.at * move.token_bytes) // size,
    )
    first = run.block if indices is None else 0
    cache_view = cache.as_strided(
        [count if indices is None else blocks, *extents],
        [in_blocks // size, *(stride // size for _, stride, _ in move.dimensions)],
        cache.storage_offset() + (move.block_offset + first * in_blocks) // size,
    )
    if into == "wire":
        wire_view.copy_(cache_view if indices is None else cache_view.index_select(0, indices))
    elif indices is None:
        cache_view.copy_(wire_view)
    else:
        cache_view.index_copy_(0, indices, wire_view)


def _check(caches: Sequence[Tensor], bound: Bound, wire_LSHTD: Elements) -> None:
    layers, rest = divmod(len(caches), bound.tensors)
    if rest:
        raise LayoutError(f"{len(caches)} tensors for layers that have {bound.tensors} each")
    expected = wire_shape(bound, layers, wire_LSHTD.shape[3] if wire_LSHTD.ndim == 5 else 0)
    if not wire_LSHTD.flags.c_contiguous or wire_LSHTD.shape != expected:
        raise LayoutError(
            f"a wire chunk must be dense [layer, kv, head, token, dim] {expected}, not {wire_LSHTD.shape}"
        )
    sizes = [bound.elements(tensor) for tensor in range(bound.tensors)]
    for cache, size in zip(caches, sizes * layers, strict=True):
        if cache.dim() != 1 or not cache.is_contiguous() or cache.element_size() != wire_LSHTD.itemsize:
            raise LayoutError(f"gather and scatter want flat tensors of {wire_LSHTD.itemsize}-byte elements")
        if cache.numel() < size or cache.device != caches[0].device:
            raise LayoutError(f"gather and scatter want tensors of {size} elements, all on one device")


def _on_host(wire_LSHTD: Elements, integer: Any) -> Tensor:
    """The same memory as a tensor; a copy where it is read-only, which torch has no word for."""
    import torch

    writable = wire_LSHTD if wire_LSHTD.flags.writeable else wire_LSHTD.copy()
    return torch.frombuffer(writable.view("u1").reshape(-1), dtype=torch.uint8).view(integer).view(wire_LSHTD.shape)
