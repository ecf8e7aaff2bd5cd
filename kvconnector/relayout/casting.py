"""Casts the elements of a wire chunk from one type to another, as `deeplink.kvconnector.layouts.cast` describes it.

numpy has neither bfloat16 nor any 8-bit float, so elements are unsigned integers of the right size, here as in
`deeplink.kvconnector.relayout.convert`. From a type of 8 or 16 bits, a cast is a look-up in a table of what each code
becomes, whatever the formats and scales; 8-bit elements are looked up in pairs. Between 16 and 32 bits it is integer
arithmetic; from 32 to 8 it is both, since rounding to odd at 16 bits loses nothing that decides the rounding to 8. All
of it runs block by block, so that what is intermediate stays in the processor's cache.

None of it depends on whether the process flushes subnormal floats to zero, as some libraries make it do.

Axes: L layer, S kv (K then V), H head, T token of the chunk, D dim.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.errors import CastRefused, LayoutError
from deeplink.kvconnector.layouts.cast import Cast
from deeplink.kvconnector.layouts.elements import FORMATS
from deeplink.kvconnector.relayout.codes import decode, encode
from deeplink.kvconnector.relayout.convert import Elements, storage_dtype

BLOCK = 1 << 17
"""Elements at a time; even, since 8-bit elements go in pairs."""

Scale = float | npt.NDArray[np.floating[Any]]
"""Of a tensor: one for all, or one per layer and kv, shape ``[L, S]``."""

Origin = tuple[int, int, int]
"""First layer, head and token of a chunk, so that an error can say where in the model a value is."""


def apply(
    cast: Cast,
    source_LSHTD: Elements,
    target_LSHTD: Elements,
    *,
    source_scale: Scale = 1.0,
    target_scale: Scale = 1.0,
    origin: Origin = (0, 0, 0),
) -> None:
    """Write what `source` holds into `target`: two dense arrays of storage integers of equal shape that do not overlap.

    Raises CastRefused naming the first value that the cast does not accept, before anything is written, and
    LayoutError for arrays that are not of the cast's types. int8 has scales of its own, and its casts are in
    `deeplink.kvconnector.relayout.quantize`; here it can only be copied.
    """
    agree(cast.source, source_LSHTD)
    agree(cast.target, target_LSHTD, source_LSHTD.shape)
    if cast.source == cast.target and (cast.source not in FORMATS or np.array_equal(source_scale, target_scale)):
        np.copyto(target_LSHTD, source_LSHTD)
        return
    if cast.source not in FORMATS or cast.target not in FORMATS:
        raise LayoutError(
            f"{cast.name} goes with scales for each token and head; see deeplink.kvconnector.relayout.quantize"
        )
    lanes = list(_lanes(source_LSHTD, target_LSHTD, source_scale, target_scale))
    special = [accept(cast, lane.source, lane.ratio, lane.start, source_LSHTD.shape, origin) for lane in lanes]
    for lane, found in zip(lanes, special, strict=True):
        convert(cast.source, cast.target, lane.ratio, lane.source, lane.target, special=found)


def agree(element: str, array: Elements, shape: tuple[int, ...] | None = None) -> None:
    """Raises LayoutError unless `array` is a dense chunk of this element type, and of this shape."""
    if array.ndim != 5 or not array.flags.c_contiguous or array.dtype != storage_dtype(element):
        raise LayoutError(f"a cast wants dense [layer, kv, head, token, dim] of {storage_dtype(element)} for {element}")
    if shape is not None and array.shape != shape:
        raise LayoutError(f"a cast wants equal shapes, not {shape} and {array.shape}")


@dataclass(frozen=True, slots=True)
class _Lane:
    """Elements that share their scales, flat, from element `start` of the chunk on."""

    source: Elements
    target: Elements
    ratio: float
    start: int


def _lanes(source: Elements, target: Elements, source_scale: Scale, target_scale: Scale) -> Iterator[_Lane]:
    layers, sides = source.shape[:2]
    scales = [np.broadcast_to(np.asarray(scale, np.float64), (layers, sides)) for scale in (source_scale, target_scale)]
    with np.errstate(all="ignore"):
        ratios = scales[0] / scales[1]
    for each in (*scales, ratios):
        if not (np.isfinite(each) & (each > 0)).all():
            raise CastRefused("a scale is not a positive number", field="cast", ours=str(each.tolist()))
    if not source.size:
        return
    if (ratios == ratios[0, 0]).all():
        yield _Lane(source.reshape(-1), target.reshape(-1), float(ratios[0, 0]), 0)
        return
    size = source[0, 0].size
    for place in itertools.product(range(layers), range(sides)):
        start = (place[0] * sides + place[1]) * size
        yield _Lane(source[place].reshape(-1), target[place].reshape(-1), float(ratios[place]), start)


def accept(
    cast: Cast,
    codes: Elements,
    ratio: float,
    start: int,
    shape: tuple[int, ...],
    origin: Origin,
    *,
    finite: bool = False,
) -> bool:
    """Whether there are NaNs or infinities among flat `codes`; raises CastRefused for a code that has no equal.

    `start` is the place of the first in a chunk of this shape. `finite`: NaNs and infinities are refused as well.
    """
    of, to = FORMATS[cast.source], FORMATS.get(cast.target)
    limit = _limit(cast.source, cast.target, ratio) if to else of.top
    infinite = bool(to and to.infinity and not finite)
    if not finite and limit == of.top and (infinite or not of.infinity):
        return True
    signed = codes.view(np.dtype(f"i{codes.itemsize}"))
    if max(int(signed.max()), int(codes.max()) & (of.sign - 1)) <= limit and (of.negative_zero or not finite):
        return False
    # The two maxima cost one pass over memory each and no intermediates; only what they find suspicious is looked at.
    for first in range(0, codes.size, BLOCK):
        block = codes[first : first + BLOCK]
        magnitude = block & block.dtype.type(of.sign - 1)
        refused = magnitude > limit
        if infinite and of.infinity:
            refused &= magnitude != of.infinity
        if not finite:
            refused &= magnitude <= max(of.top, of.infinity)
        elif not of.negative_zero:
            refused |= block == of.nan
        if refused.any():
            index = int(refused.argmax())
            raise _refusal(cast, int(block[index]), ratio, start + first + index, shape, origin)
    return True


@lru_cache(maxsize=256)
def _limit(source: str, target: str, ratio: float) -> int:
    """The code of the largest finite magnitude that fits the target."""
    of, to = FORMATS[source], FORMATS[target]
    return bisect_right(range(of.top + 1), to.brim, key=lambda code: of.value(code) * ratio) - 1


def _refusal(cast: Cast, code: int, ratio: float, at: int, shape: tuple[int, ...], origin: Origin) -> CastRefused:
    layer, side, head, token, dim = (int(index) for index in np.unravel_index(at, shape))
    value = FORMATS[cast.source].value(code)
    to = FORMATS.get(cast.target)
    kv = ("k", "v")[side] if shape[1] == 2 else "the vector"
    where = f"layer {origin[0] + layer}, {kv}, head {origin[1] + head}, token {origin[2] + token}, dim {dim}"
    theirs = f"{cast.target} up to {to.largest:g}" if to else f"{cast.target}, finite values"
    if to and ratio != 1.0:
        theirs += f" at {1 / ratio:g} of that scale"
    return CastRefused(
        f"{value:g} does not fit {cast.target}: {where}",
        field="cast",
        ours=f"{cast.source} {value:g}",
        theirs=theirs,
        remedy="start both engines with the same element type, or one that holds the other's range",
    )


def convert(source: str, target: str, ratio: float, codes: Elements, out: Elements, *, special: bool = True) -> None:
    """Flat `codes` that `accept` has let through, into `out`. `special` says that NaNs may be among them."""
    for first in range(0, codes.size, BLOCK):
        _block(source, target, ratio, codes[first : first + BLOCK], out[first : first + BLOCK], special)


def _block(source: str, target: str, ratio: float, codes: Elements, out: Elements, special: bool) -> None:
    bits = FORMATS[source].bits
    if bits == 8:
        even = codes.size & ~1
        pairs = out[:even].view(np.dtype(f"u{2 * out.itemsize}"))
        np.take(_pairs(source, target, ratio), codes[:even].view(np.uint16), out=pairs, mode="clip")
        out[even:] = _table(source, target, ratio)[codes[even:]]
    elif bits == 16 and ratio == 1.0 and (source, target) == ("bfloat16", "float32"):
        np.copyto(out, codes)
        np.left_shift(out, 16, out=out)
    elif bits == 16 and ratio == 1.0 and (source, target) == ("float16", "float32"):
        _from_float16(codes, out)
    elif bits == 16:
        np.take(_table(source, target, ratio), codes, out=out, mode="clip")
    elif ratio != 1.0:
        with np.errstate(over="ignore"):
            np.copyto(out, encode(decode(codes, FORMATS[source]) * ratio, FORMATS[target]), casting="unsafe")
    elif target == "float16":
        with np.errstate(all="ignore"):
            np.copyto(out.view(np.float16), codes.view(np.float32), casting="same_kind")
    elif target == "bfloat16":
        _to_bfloat16(codes, out, special)
    else:
        odd = (codes >> 16).astype(np.uint16)
        odd |= (codes & 0xFFFF) != 0
        np.take(_table("bfloat16", target, 1.0), odd, out=out, mode="clip")


def _to_bfloat16(codes: Elements, out: Elements, special: bool) -> None:
    """Adds just below half of the last bit that stays, or half if that bit is odd, and cuts. NaNs could overflow."""
    rounded = codes >> 16
    rounded &= 1
    rounded += codes
    rounded += 0x7FFF
    rounded >>= 16
    np.copyto(out, rounded, casting="unsafe")
    if special:
        nan = (codes & 0x7FFF_FFFF) > FORMATS["float32"].infinity
        out[nan] = (codes[nan] >> 16) | 0x40


def _from_float16(codes: Elements, out: Elements) -> None:
    """Exponent and mantissa moved to their places, and what is no normal number looked up."""
    np.copyto(out.view(np.int32), codes.view(np.int16))
    out <<= 13
    out &= 0x8FFF_E000
    out += 112 << 23
    beyond = ((codes & 0x7FFF) - np.uint16(0x400)) >= 0x7800
    places = np.flatnonzero(beyond)
    if places.size:
        out[places] = _table("float16", "float32", 1.0)[codes[places]]


@lru_cache(maxsize=128)
def _table(source: str, target: str, ratio: float) -> Elements:
    """What each code of an 8- or 16-bit type becomes."""
    of = FORMATS[source]
    codes = np.arange(1 << of.bits, dtype=storage_dtype(source))
    table = encode(decode(codes, of) * ratio, FORMATS[target]).astype(storage_dtype(target))
    table.setflags(write=False)
    return table


@lru_cache(maxsize=32)
def _pairs(source: str, target: str, ratio: float) -> Elements:
    """The same for two 8-bit codes at once, the first in the lower byte."""
    one = _table(source, target, ratio)
    wide = one.astype(np.dtype(f"u{2 * one.itemsize}"))
    pairs: Elements = (wide[:, None] << (8 * one.itemsize) | wide[None, :]).reshape(-1)
    pairs.setflags(write=False)
    return pairs
