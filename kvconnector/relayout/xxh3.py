"""XXH3, 64 bits, with a seed, for compiled code: the digest's function, without a call of Python's for every tile.

Written from the algorithm's specification; the tests hold it to the xxhash package, whose values go over the wire.
Inputs up to 240 bytes have ways of their own; longer ones are taken a line at a time into eight accumulators, which
one vector holds. Needs numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from deeplink.kvconnector.relayout.jit import part, whole
from deeplink.kvconnector.relayout.vectors import emit_prefetch

_U = np.uint64
_P32_1, _P32_2, _P32_3 = _U(0x9E3779B1), _U(0x85EBCA77), _U(0xC2B2AE3D)
_P64_1, _P64_2, _P64_3 = _U(0x9E3779B185EBCA87), _U(0xC2B2AE3D27D4EB4F), _U(0x165667B19E3779F9)
_P64_4, _P64_5 = _U(0x85EBCA77C2B2AE63), _U(0x27D4EB2F165667C5)
_MX1, _MX2 = _U(0x165667919E3779F9), _U(0x9FB21C651E98DF25)
SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
        "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint64,
)
"""The function's constant; compiled code gets its address."""
STATE = 8 + 24
"""64-bit words of memory that `xxh3` works in: the accumulators, and the secret with the seed in it."""
_LINES, _SCRAMBLE, _LAST = 16, 128, 121
"""Lines between two scrambles, and where their secrets are."""
_AHEAD = 64
"""Lines to fetch ahead."""


def _loads(kind: Any, bits: int) -> Any:
    """A function that reads an unsigned integer of `bits` bits at an address."""

    @intrinsic
    def made(_typing: Any, address: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, arguments: list[Any]) -> Any:
            value = builder.load(builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer()))
            value.align = 1
            return builder.zext(value, ir.IntType(64)) if bits < 64 else value

        return kind(types.intp), codegen

    return made


_read8, read32, read64 = _loads(types.uint64, 8), _loads(types.uint64, 32), _loads(types.uint64, 64)


@intrinsic
def _fold(_typing: Any, a: Any, b: Any) -> Any:
    """Both halves of the 128-bit product, xor-ed."""

    def codegen(_context: Any, builder: Any, _signature: Any, arguments: list[Any]) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(factor, wide) for factor in arguments))
        high = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))
        return builder.xor(builder.trunc(product, ir.IntType(64)), high)

    return types.uint64(types.uint64, types.uint64), codegen


_EIGHT = ir.VectorType(ir.IntType(64), 8)


def _splat(value: int) -> Any:
    return ir.Constant(_EIGHT, [value] * 8)


def _vector(builder: Any, address: Any) -> Any:
    value = builder.load(builder.inttoptr(address, _EIGHT.as_pointer()))
    value.align = 1
    return value


@intrinsic
def _accumulate(_typing: Any, state: Any, start: Any, secret: Any, lines: Any) -> Any:
    """Take in `lines` lines at `start`; the secret moves on by 8 bytes for each."""

    def codegen(context: Any, builder: Any, _signature: Any, arguments: list[Any]) -> Any:
        state, start, secret, lines = arguments
        where = builder.inttoptr(state, _EIGHT.as_pointer())
        sums = cgutils.alloca_once_value(builder, _vector(builder, state))
        with cgutils.for_range(builder, lines) as loop:
            data = _vector(builder, builder.add(start, builder.mul(loop.index, ir.Constant(start.type, 64))))
            later = builder.add(loop.index, ir.Constant(start.type, _AHEAD))
            emit_prefetch(builder, builder.add(start, builder.mul(later, ir.Constant(start.type, 64))))
            key = _vector(builder, builder.add(secret, builder.mul(loop.index, ir.Constant(secret.type, 8))))
            mixed = builder.xor(data, key)
            product = builder.mul(builder.and_(mixed, _splat(0xFFFFFFFF)), builder.lshr(mixed, _splat(32)))
            neighbour = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])
            swapped = builder.shuffle_vector(data, data, neighbour)
            builder.store(builder.add(builder.load(sums), builder.add(swapped, product)), sums)
        builder.store(builder.load(sums), where).align = 8
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), codegen


@intrinsic
def _scramble(_typing: Any, state: Any, secret: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, arguments: list[Any]) -> Any:
        state, secret = arguments
        sums = _vector(builder, state)
        sums = builder.xor(builder.xor(sums, builder.lshr(sums, _splat(47))), _vector(builder, secret))
        sums = builder.mul(sums, _splat(int(_P32_1)))
        builder.store(sums, builder.inttoptr(state, _EIGHT.as_pointer())).align = 8
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@part
def _avalanche(h: Any) -> Any:
    h ^= h >> _U(37)
    h *= _MX1
    return h ^ (h >> _U(32))


@part
def _mix(start: int, secret: int, seed: Any) -> Any:
    """16 bytes with 16 of the secret."""
    return _fold(read64(start) ^ (read64(secret) + seed), read64(start + 8) ^ (read64(secret + 8) - seed))


@part
def _swapped(value: Any) -> Any:
    """The bytes in reverse order."""
    value = ((value & _U(0x00FF00FF00FF00FF)) << _U(8)) | ((value >> _U(8)) & _U(0x00FF00FF00FF00FF))
    value = ((value & _U(0x0000FFFF0000FFFF)) << _U(16)) | ((value >> _U(16)) & _U(0x0000FFFF0000FFFF))
    return (value << _U(32)) | (value >> _U(32))


@part
def _rotated(value: Any, by: int) -> Any:
    return (value << _U(by)) | (value >> _U(64 - by))


@part
def _to_16(start: int, size: int, seed: Any, secret: int) -> Any:
    if size > 8:
        low = read64(start) ^ ((read64(secret + 24) ^ read64(secret + 32)) + seed)
        high = read64(start + size - 8) ^ ((read64(secret + 40) ^ read64(secret + 48)) - seed)
        return _avalanche(_U(size) + _swapped(low) + high + _fold(low, high))
    if size >= 4:
        seed ^= _swapped(seed & _U(0xFFFFFFFF))
        both = read32(start + size - 4) + (read32(start) << _U(32))
        h = both ^ ((read64(secret + 8) ^ read64(secret + 16)) - seed)
        h ^= _rotated(h, 49) ^ _rotated(h, 24)
        h *= _MX2
        h ^= (h >> _U(35)) + _U(size)
        h *= _MX2
        return h ^ (h >> _U(28))
    if size == 0:
        h = seed ^ read64(secret + 56) ^ read64(secret + 64)
    else:
        first, middle, last = _read8(start), _read8(start + size // 2), _read8(start + size - 1)
        h = (first << _U(16)) | (middle << _U(24)) | last | (_U(size) << _U(8))
        h ^= (read32(secret) ^ read32(secret + 4)) + seed
    h ^= h >> _U(33)
    h *= _P64_2
    h ^= h >> _U(29)
    h *= _P64_3
    return h ^ (h >> _U(32))


@part
def _to_240(start: int, size: int, seed: Any, secret: int) -> Any:
    h = _U(size) * _P64_1
    if size <= 128:
        # From both ends inwards.
        for i in range((size - 1) // 32, -1, -1):
            h += _mix(start + 16 * i, secret + 32 * i, seed)
            h += _mix(start + size - 16 * (i + 1), secret + 32 * i + 16, seed)
        return _avalanche(h)
    for i in range(8):
        h += _mix(start + 16 * i, secret + 16 * i, seed)
    h = _avalanche(h)
    for i in range(8, size // 16):
        h += _mix(start + 16 * i, secret + 16 * (i - 8) + 3, seed)
    return _avalanche(h + _mix(start + size - 16, secret + 136 - 17, seed))


LINE = 64
"""Bytes of which several may be taken in at a time, by `feed`."""


@part
def begin(state: Any) -> None:
    """For an input of whole lines that comes in pieces, without a seed; more than 240 bytes in all."""
    state[0], state[1], state[2], state[3] = _P32_3, _P64_1, _P64_2, _P64_3
    state[4], state[5], state[6], state[7] = _P64_4, _P32_2, _P64_5, _P32_1


@part
def feed(start: int, length: int, done: int, size: int, secret: int, state: Any) -> int:
    """Take in the next piece of an input of `size` bytes, of which `done` lines have been; how many have been then."""
    sums = state.ctypes.data
    lines = size // LINE - 1
    left = length // LINE
    while left > 0:
        if done == lines:
            _accumulate(sums, start, secret + _LAST, 1)
            return done + 1
        turn = done % _LINES
        some = min(_LINES - turn, left, lines - done)
        _accumulate(sums, start, secret + 8 * turn, some)
        if turn + some == _LINES:
            _scramble(sums, secret + _SCRAMBLE)
        done += some
        left -= some
        start += some * LINE
    return done


@part
def end(size: int, secret: int, state: Any) -> Any:
    """The digest of the pieces."""
    h = _U(size) * _P64_1
    for i in range(4):
        key = secret + 11 + 16 * i
        h += _fold(state[2 * i] ^ read64(key), state[2 * i + 1] ^ read64(key + 8))
    return _avalanche(h)


@part
def _longer(start: int, size: int, seed: Any, secret: int, state: Any) -> Any:
    sums = state.ctypes.data
    seeded = sums + 64
    begin(state)
    for i in range(0, 24, 2):
        state[8 + i] = read64(secret + 8 * i) + seed
        state[9 + i] = read64(secret + 8 * i + 8) - seed
    lines = (size - 1) // 64
    done = 0
    while done + _LINES <= lines:
        _accumulate(sums, start + 64 * done, seeded, _LINES)
        _scramble(sums, seeded + _SCRAMBLE)
        done += _LINES
    _accumulate(sums, start + 64 * done, seeded, lines - done)
    _accumulate(sums, start + size - 64, seeded + _LAST, 1)
    return end(size, seeded, state)


@part
def xxh3(start: int, size: int, seed: Any, secret: int, state: Any) -> Any:
    """Of `size` bytes at `start`; `secret` is the address of `SECRET`, `state` an array of `STATE` words to work in."""
    if size > 240:
        return _longer(start, size, seed, secret, state)
    if size > 16:
        return _to_240(start, size, seed, secret)
    return _to_16(start, size, seed, secret)


@whole
def digests(
    base: int,
    spans: Any,
    seeds: Any,
    phases: Any,
    every: int,
    lane_bytes: int,
    secret: int,
    state: Any,
    out: Any,
) -> None:
    """`out[lane, k]`, the digest of bytes ``[spans[k, 0], spans[k, 1])`` of each lane, seeded with the lane's seed or
    ``spans[k, 2]``; 0 where the lane's phase and ``spans[k, 2]`` together are no multiple of `every`."""
    for lane in range(seeds.size):
        for k in range(spans.shape[0]):
            if (phases[lane] + spans[k, 2]) % every:
                out[lane, k] = 0
                continue
            first = base + lane * lane_bytes + spans[k, 0]
            out[lane, k] = xxh3(first, spans[k, 1] - spans[k, 0], seeds[lane] | _U(spans[k, 2]), secret, state)


def warm() -> None:
    """Compile, by digesting nothing."""
    nothing = np.zeros(1, np.uint8), np.zeros((0, 3), np.int64)
    of_lanes(*nothing, np.zeros(1, np.uint64), np.zeros(1, np.int64), 1)


def of_lanes(
    dense: npt.NDArray[Any],
    spans: npt.NDArray[np.int64],
    seeds: npt.NDArray[np.uint64],
    phases: npt.NDArray[np.int64],
    every: int,
) -> Any:
    """Digests ``[lane, span]`` of an array that is as many lanes as there are seeds; spans are (first byte, after the
    last, to be or-ed into the seed). Of those that `phases` and `every` choose, as `digests` says."""
    out = np.empty((seeds.size, len(spans)), np.uint64)
    base = dense.__array_interface__["data"][0]
    lane_bytes, state = dense.nbytes // seeds.size, np.empty(STATE, np.uint64)
    digests(base, spans, seeds, phases, every, lane_bytes, SECRET.ctypes.data, state, out)
    return out
