"""Re-layout of caches that are torch tensors, on whatever device torch knows: between their blocks and a wire chunk in
host memory.

The moves are those of `deeplink.kvconnector.relayout.convert`, done by the device as strided copies into (or out of)
some layers in wire form that lie there, which then cross to the host as one piece. Elements are moved as integers, so
any dtype of the right size does. This is the one module of kvconnector that uses torch, and only when it is called: the
engine that has such tensors brings it.

Who orders what, since a device does its work later and in streams:

| function | its copies come after | returns |
|---|---|---|
| gather | what is on the calling thread's current stream | when they are done |
| scatter | the same; with `after`, what that mark stands for, on a stream of its own | when they are done |
| mark | | at once; it stands for what is on the calling thread's current stream by then |

The caller vouches that what writes the blocks, or still reads them, is there: on that stream, or before it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from deeplink.errors import HandoffError, LayoutError
from deeplink.kvconnector.layouts.layout import Bound
from deeplink.kvconnector.relayout.convert import STORAGE, wire_shape
from deeplink.kvconnector.relayout.moves import Into, Move, checked, moves
from deeplink.kvconnector.relayout.plan import Run

if TYPE_CHECKING:
    from torch import Tensor

Elements = npt.NDArray[Any]

HOST = ("cpu",)
"""Devices whose memory is the host's, so that nothing has to cross."""
SCRATCH = 32 << 20
"""Bytes of layers in wire form on the device at a time, unless one has more: few calls, and little of its memory."""


def gather(caches: Sequence[Tensor], bound: Bound, where: Iterable[Run], wire_LSHTD: Elements) -> None:
    """Blocks to wire, as `deeplink.kvconnector.relayout.convert.gather`; the flat caches are torch tensors of one
    device.

    Raises HandoffError when the device has no memory left for the copies.
    """
    _copy(caches, bound, where, wire_LSHTD, "wire", None)


def scatter(
    wire_LSHTD: Elements, bound: Bound, where: Iterable[Run], caches: Sequence[Tensor], after: Any = None
) -> None:
    """Wire to blocks. Writes the elements of these tokens and no others. `after` is a `mark`."""
    _copy(caches, bound, where, wire_LSHTD, "blocks", after)


def mark(device: Any) -> Any:
    """An event that comes once what is on the current stream now has been done; None where memory is the host's."""
    if device.type in HOST:
        return None
    event = runtime(device).Event()
    event.record(runtime(device).current_stream(device))
    return event


def runtime(device: Any) -> Any:
    """The module of torch with the device's streams: torch.cuda, torch.npu, …. Raises LayoutError where it has none."""
    import torch

    found = getattr(torch, device.type, None)
    if not all(hasattr(found, name) for name in ("Event", "Stream", "current_stream", "stream")):
        raise LayoutError(
            f"torch has no streams for {device} memory, so nothing says when a copy there is done",
            field="device",
            theirs=str(device),
            remedy="import the package that brings this device to torch before the engine starts deeplink",
        )
    return found


@lru_cache(maxsize=64)
def _side(device: Any) -> Any:
    """One stream for all that lands on a device: an engine's own would hold it up, and it the engine's."""
    return runtime(device).Stream(device=device)


@contextlib.contextmanager
def _ordered(device: Any, after: Any) -> Iterator[None]:
    """What is copied inside comes after `after`, or what is on the current stream, and is done at the end."""
    if device.type in HOST:
        yield
        return
    stream = runtime(device).current_stream(device) if after is None else _side(device)
    with contextlib.nullcontext() if after is None else runtime(device).stream(stream):
        if after is not None:
            after.wait(stream)
        try:
            yield
        finally:  # what was begun is over, even if not all of it could be
            stream.synchronize()


def _copy(
    caches: Sequence[Tensor], bound: Bound, where: Iterable[Run], wire_LSHTD: Elements, into: Into, after: Any
) -> None:
    import torch

    _check(caches, bound, wire_LSHTD)
    if into == "wire" and not wire_LSHTD.flags.writeable:
        raise ValueError("the target of a copy is read-only")
    tokens = wire_LSHTD.shape[3]
    runs = checked(where, bound, tokens)
    if not runs or not caches:
        return
    device = caches[0].device
    try:
        with _ordered(device, after):
            if device.type in HOST:
                relayout(caches, bound, runs, _on_host(wire_LSHTD), into)
            else:
                # What the runs leave out of the wire is to stay as it is.
                partial = into == "blocks" or sum(run.count * run.tokens for run in runs) < tokens
                _cross(caches, bound, runs, _on_host(wire_LSHTD), into, partial)
    except torch.cuda.OutOfMemoryError as exc:  # torch's own name for it on every device
        raise HandoffError(
            f"{device} has no memory left to copy the KV cache through",
            field="device",
            ours=str(exc),
            remedy=f"leave the device some 64 MiB more: lower the engine's share of its memory, or kv.chunk ({exc})",
        ) from exc


def _cross(caches: Sequence[Tensor], bound: Bound, runs: list[Run], host: Tensor, into: Into, partial: bool) -> None:
    """Some layers at a time, by way of the device's memory."""
    import torch

    step = max(1, SCRATCH // max(1, host[0].numel() * host.element_size()))
    for first in range(0, len(host), step):
        wire = host[first : first + step]
        scratch = torch.empty(wire.shape, dtype=wire.dtype, device=caches[0].device)
        if partial:
            scratch.copy_(wire)
        of_these = caches[first * bound.tensors : (first + step) * bound.tensors]
        relayout(of_these, bound, runs, scratch, into)
        if into == "wire":
            wire.copy_(scratch)


def relayout(caches: Sequence[Tensor], bound: Bound, runs: list[Run], wire: Tensor, into: Into) -> None:
    """Between blocks and a wire chunk that are both on the device, put on the current stream. Nothing is checked."""
    places = list(_places(runs, bound, wire.element_size(), wire.shape[3], wire.device))
    for layer, staged in enumerate(wire):
        for move, indices, first in places:
            cache = caches[layer * bound.tensors + move.tensor].view(wire.dtype)
            _assign(cache, staged.view(-1), move, indices, first, bound.blocks, into)


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


def array(tensor: Tensor) -> Elements:
    """The same memory as an array of integers, of a tensor in host memory."""
    size = tensor.element_size()
    integers: Elements = tensor.view(_integer(size)).numpy().view(STORAGE[size])
    return integers


def of_elements(elements: Elements, dtype: Any) -> Tensor:
    """The same memory as a tensor in host memory of torch's type `dtype`, which these integers are elements of."""
    import torch

    return torch.from_numpy(elements.view(f"i{elements.itemsize}")).view(dtype)


def _integer(size: int) -> Any:
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]


def _on_host(wire_LSHTD: Elements) -> Tensor:
    """The same memory as a tensor of integers. torch has no word for memory that is read-only, as a peer lends it, so
    the tensor does not say so; a scatter only reads it."""
    import torch

    memory: Any = wire_LSHTD.view("u1").reshape(-1)
    if not wire_LSHTD.flags.writeable:
        memory = (ctypes.c_char * wire_LSHTD.nbytes).from_address(wire_LSHTD.__array_interface__["data"][0])
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    return flat.view(_integer(wire_LSHTD.itemsize)).view(wire_LSHTD.shape)
