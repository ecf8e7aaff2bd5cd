"""Machine instructions that the compiled loops are made of: wide moves, stores past the caches, small transpositions.

Every function here takes addresses and trusts them. They are written as LLVM vectors, so that each processor gets the
widest it has. A *streaming* store does not first read the line that it fills, which for a target larger than the
caches is a third of all traffic; it wants an address that is a multiple of its size, and `fence` before anybody else
may look.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LINE = 64
"""Bytes that travel between memory and the caches at once."""
LANE = 16
"""Bytes inside which every processor can shuffle cheaply."""

_INDEX = ir.IntType(32)
_Values = list[Any]


def _vector(element: int, count: int) -> Any:
    return ir.VectorType(ir.IntType(8 * element), count)


def _load(builder: Any, kind: Any, address: Any) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def _store(builder: Any, value: Any, address: Any, streaming: bool = False) -> None:
    store = builder.store(value, builder.inttoptr(address, value.type.as_pointer()))
    store.align = 1
    if streaming:
        store.align = value.type.count * value.type.element.width // 8
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_INDEX, 1)]))


def _store_rows(builder: Any, rows: _Values, to: Any, to_stride: Any, stream: Any) -> None:
    with builder.if_else(stream) as (then, otherwise):
        for branch, streaming in ((then, True), (otherwise, False)):
            with branch:
                for index, row in enumerate(rows):
                    _store(builder, row, _at(builder, to, to_stride, index), streaming)


def _at(builder: Any, base: Any, stride: Any, index: int) -> Any:
    return builder.add(base, builder.mul(stride, ir.Constant(stride.type, index)))


def _shuffle(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INDEX, len(order)), order))


def _joined(builder: Any, parts: _Values) -> Any:
    """One vector of several, end to end."""
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [_shuffle(builder, a, b, list(range(2 * a.type.count))) for a, b in pairs]
    return parts[0]


def _of_two(emit: Callable[[Any, Any, Any], None]) -> Any:
    """``f(to, start)`` for compiled code, with the instructions that `emit` writes."""

    @intrinsic
    def made(_typing: Any, to: Any, start: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, arguments: _Values) -> Any:
            emit(builder, *arguments)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), codegen

    return made


def emit_prefetch(builder: Any, address: Any) -> None:
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _INDEX, _INDEX, _INDEX])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    read, everywhere, data = (ir.Constant(_INDEX, number) for number in (0, 3, 1))
    builder.call(function, [builder.inttoptr(address, pointer), read, everywhere, data])


_Emit = Callable[[Any, Any, Any], _Values]
"""Writes the instructions that read at an address, with a stride, and names the rows that come of it."""


def _tile(emit: _Emit) -> Any:
    """``f(to, to_stride, start, start_stride, stream)``: read a tile and write its rows."""

    @intrinsic
    def made(_typing: Any, to: Any, to_stride: Any, start: Any, start_stride: Any, stream: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, arguments: _Values) -> Any:
            address, stride, *source, streaming = arguments
            _store_rows(builder, emit(builder, *source), address, stride, streaming)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp, types.intp, types.boolean), codegen

    return made


def _move(size: int, streaming: bool = False) -> Any:
    unit = min(size, 8)

    def emit(builder: Any, to: Any, start: Any) -> None:
        _store(builder, _load(builder, _vector(unit, size // unit), start), to, streaming)

    return _of_two(emit)


move1, move2, move4, move8, move16, move32, move64 = (_move(1 << power) for power in range(7))


def _four(streaming: bool) -> Any:
    def emit(builder: Any, to: Any, start: Any) -> None:
        sixty_four = ir.Constant(start.type, LINE)
        lines = [_load(builder, _vector(8, 8), _at(builder, start, sixty_four, at)) for at in range(4)]
        for at, line in enumerate(lines):
            _store(builder, line, _at(builder, to, sixty_four, at), streaming)

    return _of_two(emit)


move256, stream256 = _four(streaming=False), _four(streaming=True)
"""Four lines, all of them read first."""
stream64 = _move(64, streaming=True)


def _transpose(element: int, lanes: int) -> _Emit:
    """n rows of one lane each become columns, where a lane holds n / `lanes` elements.

    With k elements to a lane, row ``k * q + i`` is loaded into lane q of register i; log2(k) perfect shuffles of the
    registers, inside their lanes, then leave the columns.
    """
    lane = max(element, LANE)
    count = lane // element
    unit = min(element, 8)
    width = count * lanes
    low, high = (
        [lane * count + half + at // 2 + at % 2 * width for lane in range(lanes) for at in range(count)]
        for half in (0, count // 2)
    )

    def emit(builder: Any, start: Any, start_stride: Any) -> _Values:
        kind = _vector(unit, lane // unit)
        rows = [
            _joined(
                builder,
                [_load(builder, kind, _at(builder, start, start_stride, q * count + i)) for q in range(lanes)],
            )
            for i in range(count)
        ]
        for _ in range(count.bit_length() - 1):
            pairs = list(zip(rows[: count // 2], rows[count // 2 :], strict=True))
            rows = [_shuffle(builder, a, b, order) for a, b in pairs for order in (low, high)]
        return rows

    return emit


TRANSPOSED = (1, 2, 4, 16, 32)
"""Bytes of the elements that `transpose` is for."""


def _bands(builder: Any, element: int, lanes: int, arguments: _Values) -> None:
    """Bands of tiles, each as many rows as a tile has; see `transpose`. A tile fetches its share of the lines of a
    later band: where the rows of the source are lines or more apart, the tiles under one line take turns."""
    _, to, to_stride, start, start_stride, column, forward, wrap, limit, bands, tiles, stream = arguments
    side = max(LANE // element, 1)
    rows = lanes * side
    emit = _transpose(element, lanes)

    def number(value: int) -> Any:
        return ir.Constant(to.type, value)

    apart = builder.icmp_signed(">=", start_stride, number(LINE))
    step = builder.select(apart, start_stride, number(LINE))
    with cgutils.for_range(builder, bands) as band:
        row = builder.mul(band.index, number(rows))
        to_band = builder.add(to, builder.mul(row, number(element)))
        start_band = builder.add(start, builder.mul(row, start_stride))
        near = builder.icmp_signed("<", row, limit)
        later = builder.add(start_band, builder.select(near, forward, wrap))
        with cgutils.for_range(builder, tiles) as tile:
            first = builder.mul(tile.index, number(side))
            here = builder.mul(first, column)
            turn = builder.and_(first, number(rows - 1))
            share = builder.select(
                apart, builder.add(here, builder.mul(turn, start_stride)), builder.mul(first, number(LINE))
            )
            for line in range(side):
                emit_prefetch(builder, _at(builder, builder.add(later, share), step, line))
            found = emit(builder, builder.add(start_band, here), start_stride)
            _store_rows(builder, found, builder.add(to_band, builder.mul(first, to_stride)), to_stride, stream)


@intrinsic
def transpose(
    _typing: Any,
    kind: Any,
    to: Any,
    to_stride: Any,
    start: Any,
    start_stride: Any,
    column: Any,
    forward: Any,
    wrap: Any,
    limit: Any,
    bands: Any,
    tiles: Any,
    stream: Any,
) -> Any:
    """Transpose `bands` bands of `tiles` tiles side by side, `column` being the stride between the source's columns.

    `kind` is three times the element's place in `TRANSPOSED`, plus 0 to 2 for tiles whose rows in the target are a
    line, half of one or a lane. What will be read next is `forward` bytes on, from row `limit` on `wrap` bytes. This
    is one function because every loop that numba compiles costs a second.
    """

    def codegen(context: Any, builder: Any, _signature: Any, arguments: _Values) -> Any:
        after = builder.append_basic_block("after")
        switch = builder.switch(arguments[0], after)
        for place, element in enumerate(TRANSPOSED):
            most = LINE // max(element, LANE)
            for size, lanes in enumerate((most, max(most // 2, 1), 1)):
                block = builder.append_basic_block("kind")
                switch.add_case(ir.Constant(arguments[0].type, 3 * place + size), block)
                builder.position_at_end(block)
                _bands(builder, element, lanes, arguments)
                builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 11, types.boolean), codegen


def _split(lines: int) -> _Emit:
    """One or two lines of alternating 2-byte elements (at `start`, ``start + start_stride``): all the even ones, then
    all the odd ones, as rows."""

    def emit(builder: Any, start: Any, start_stride: Any) -> _Values:
        parts = [_load(builder, _vector(2, 32), _at(builder, start, start_stride, line)) for line in range(lines)]
        both = _joined(builder, parts)
        return [_shuffle(builder, both, both, list(range(odd, 32 * lines, 2))) for odd in (0, 1)]

    return emit


def _join(builder: Any, start: Any, start_stride: Any) -> _Values:
    """The reverse: half a line each at `start` and ``start + start_stride`` become one that alternates."""
    a, b = (_load(builder, _vector(2, 16), _at(builder, start, start_stride, odd)) for odd in (0, 1))
    return [_shuffle(builder, a, b, [at + odd * 16 for at in range(16) for odd in (0, 1)])]


split1, split2, join = _tile(_split(1)), _tile(_split(2)), _tile(_join)


@intrinsic
def prefetch(_typing: Any, address: Any) -> Any:
    """Have this line in the cache soon. Any address will do; a wrong one costs a little time."""

    def codegen(context: Any, builder: Any, _signature: Any, arguments: _Values) -> Any:
        emit_prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@intrinsic
def fence(_typing: Any) -> Any:
    """Streamed bytes are where every thread, process and device can see them."""

    def codegen(context: Any, builder: Any, _signature: Any, _arguments: _Values) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen
