"""int8 with one scale per token and head, from and to the floating-point types.

Ours is symmetric: a row (the dims of one token and head) has the scale ``max |row| / 127``, at least `SMALLEST_SCALE`,
and a code means itself times the scale. Engines that keep a zero beside the scale have unsigned codes; one means
``(code - zero) * scale``, and `dequantize` reads that too.

Axes: L layer, S kv (K then V), H head, T token of the chunk, D dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.errors import CastRefused, LayoutError
from deeplink.kvconnector.layouts.cast import SMALLEST_SCALE, Cast
from deeplink.kvconnector.layouts.elements import FORMATS, INTEGER
from deeplink.kvconnector.relayout.casting import BLOCK, Origin, accept, agree, convert
from deeplink.kvconnector.relayout.codes import decode
from deeplink.kvconnector.relayout.convert import Elements

STEPS = 127

Rows = npt.NDArray[np.float32]
"""One number per token and head, shape ``[L, S, H, T, 1]``."""


def quantize(
    cast: Cast, source_LSHTD: Elements, target_LSHTD: Elements, scales_LSHT1: Rows, *, origin: Origin = (0, 0, 0)
) -> None:
    """Write the codes of `source` (int8 as storage integers, never -128) and the scale of each row.

    Scales are for a source whose own scale is 1; else multiply them by it. Raises CastRefused, before anything is
    written, where an infinity or NaN is, which no scale can reach.
    """
    _agree(cast.source in FORMATS and cast.target == INTEGER, cast, source_LSHTD, target_LSHTD, scales_LSHT1)
    if not source_LSHTD.size:
        return
    accept(cast, source_LSHTD.reshape(-1), 1.0, 0, source_LSHTD.shape, origin, finite=True)
    of = FORMATS[cast.source]
    codes, out, scales = _rows(source_LSHTD), _rows(target_LSHTD).view(np.int8), scales_LSHT1.reshape(-1, 1)
    for rows in _blocks(codes):
        # Magnitudes are in the order of their codes, and integers of 16 bits or 8 are compared several times as fast.
        largest = (codes[rows] & codes.dtype.type(of.sign - 1)).max(axis=1, keepdims=True)
        scale = decode(largest, of).astype(np.float32) / np.float32(STEPS)
        scales[rows] = np.maximum(scale, np.float32(SMALLEST_SCALE))
        values = _float32(cast.source, codes[rows])
        values /= scales[rows]
        np.rint(values, out=values)
        np.copyto(out[rows], values, casting="unsafe")


def dequantize(
    cast: Cast,
    source_LSHTD: Elements,
    scales_LSHT1: Rows,
    target_LSHTD: Elements,
    *,
    zeros_LSHT1: Rows | None = None,
    origin: Origin = (0, 0, 0),
) -> None:
    """Write what the codes mean. With zeros they are unsigned. For a target whose scale is not 1, divide `scales`.

    Raises CastRefused, before anything is written, for a value beyond the target and for a scale or zero that is not
    finite.
    """
    _agree(cast.source == INTEGER and cast.target in FORMATS, cast, source_LSHTD, target_LSHTD, scales_LSHT1)
    if zeros_LSHT1 is not None:
        _agree(True, cast, source_LSHTD, target_LSHTD, zeros_LSHT1)
    if not source_LSHTD.size:
        return
    for name, given in (("scale", scales_LSHT1), ("zero", zeros_LSHT1)):
        if given is not None and not np.isfinite(given).all():
            raise CastRefused(f"an int8 {name} is not a finite number", field="cast", ours=cast.source)
    codes, out, scales = _rows(source_LSHTD), _rows(target_LSHTD), scales_LSHT1.reshape(-1, 1)
    zeros = None if zeros_LSHT1 is None else zeros_LSHT1.reshape(-1, 1)
    to_target = Cast("float32", cast.target, cast.exact, cast.bound, cast.relative, cast.absolute)
    if _reach(scales, zeros) > FORMATS[cast.target].largest:
        for rows in _blocks(codes):
            bits = _values(codes[rows], scales[rows], zeros, rows).view(np.uint32).reshape(-1)
            start = rows.start * codes.shape[1]
            accept(to_target, bits, 1.0, start, source_LSHTD.shape, origin, finite=True)
    for rows in _blocks(codes):
        bits = _values(codes[rows], scales[rows], zeros, rows).view(np.uint32)
        if cast.target == "float32":
            out[rows] = bits
        else:
            convert("float32", cast.target, 1.0, bits.reshape(-1), out[rows].reshape(-1), special=False)


def _agree(known: bool, cast: Cast, source: Elements, target: Elements, numbers: Rows) -> None:
    if not known:
        raise LayoutError(
            f"{cast.name} does not go with scales for each token and head; see deeplink.kvconnector.relayout.casting"
        )
    agree(cast.source, source)
    agree(cast.target, target, source.shape)
    shape = (*source.shape[:4], 1)
    if numbers.shape != shape or numbers.dtype != np.float32 or not numbers.flags.c_contiguous:
        raise LayoutError(f"a scale for each token and head is a dense float32 {shape}, not {numbers.shape}")


def _rows(array: Elements) -> Elements:
    return array.reshape(-1, array.shape[4])


def _blocks(rows: npt.NDArray[Any]) -> Iterator[slice]:
    step = max(1, BLOCK // rows.shape[1])
    return (slice(first, min(first + step, len(rows))) for first in range(0, len(rows), step))


def _float32(source: str, codes: Elements) -> npt.NDArray[np.float32]:
    """A copy."""
    if source == "float32":
        return codes.view(np.float32).copy()
    values = np.empty(codes.shape, np.uint32)
    convert(source, "float32", 1.0, codes.reshape(-1), values.reshape(-1))
    return values.view(np.float32)


def _values(codes: Elements, scales: Rows, zeros: Rows | None, rows: slice) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        if zeros is None:
            return codes.view(np.int8) * scales
        return (codes - zeros[rows]) * scales


def _reach(scales: Rows, zeros: Rows | None) -> float:
    """No value is larger than this."""
    code = 128.0 if zeros is None else 255.0 + float(np.abs(zeros).max())
    return code * float(np.abs(scales).max())
