"""What the bytes of a KV cache mean.

A cache maps a logical element (kv, block, head, token, dim) to a place in memory, and for every engine known so
far that map is affine once axes are split into factors. So a layout is one line of text, outermost axis first:

    block token head (kv dim)                    K and V interleaved per token and head ("NHD")
    block head token (kv dim)                    the same, head-major ("HND")
    block head (k: dim token | v: token dim)     K transposed, V plain, one after the other
    kv block (head dim)/16 token (head dim)%16   16 elements of all heads' dim at a time ("fractal NZ")
    kv | slot head dim                           one tensor for K and one for V, blocks and tokens in one axis
    block token dim                              one vector a token, shared by all heads (MLA: latent, then rope)
    dim 512+64 | block token dim                 the same with the two parts in tensors of their own

``token/16`` and ``token%16`` are the quotient and the remainder of the token's index, so the two together are the
axis. ``(kv dim)`` is two adjacent axes read as one by the engine; it means the same as ``kv dim``, but can be
factored as a whole. ``(k: … | v: …)`` is a run of K followed by a run of V, each in its own order; it comes last,
and after ``kv |`` it is the order in each tensor. ``token`` counts inside a block, and ``slot`` is ``block token``.

`Layout.parse` reads the text, `str` prints it back, and `Layout.bind` turns it into strides once the sizes are known;
strides that are wider than dense come from the live tensor. All strides and offsets are in elements, not bytes.
A dummy first block or slot is nothing special here: it is a block that no block table names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from deeplink.errors import LayoutError
from deeplink.kvconnector.layouts.notation import KV, ONE_TENSOR, Axis, Item, Tensors, flat, parse

RECORDS = {"uint8[fp8_ds_mla]": 656}
"""Opaque records, with the bytes of one token: quantised elements, their scales and whatever else the engine keeps
with them. They are moved as bytes (`head_dim` is this number) and never cast."""

ELEMENTS = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "int8": 1,
    **dict.fromkeys(RECORDS, 1),
}
"""Element types that a layout can be stated for, with their size in bytes."""


@dataclass(frozen=True, slots=True)
class Factor:
    """One dimension of a strided view: `extent` steps of `unit` along `axis`, each `stride` elements apart."""

    axis: str
    extent: int
    unit: int
    stride: int


@dataclass(frozen=True, slots=True)
class Strided:
    """Where K (or V, or a part of dim) is: `offset` of logical element 0 in its tensor, then one factor per dimension,
    in canonical axis order (block, head, token…, dim…). `kv` and `first_dim` say which elements they are."""

    offset: int
    factors: tuple[Factor, ...]
    tensor: int = 0
    kv: int = 0
    first_dim: int = 0

    def of(self, axis: str) -> tuple[Factor, ...]:
        return tuple(factor for factor in self.factors if factor.axis == axis)


@dataclass(frozen=True, slots=True)
class Bound:
    """A layout with sizes. `block_elements` is the size of one block with its padding, all tensors together, in
    elements. `sides` are K and V, or the one vector, or its parts; together they cover each element once."""

    sides: tuple[Strided, ...]
    heads: int
    head_dim: int
    block_size: int
    blocks: int
    block_elements: int

    @property
    def k(self) -> Strided:
        return self.sides[0]

    @property
    def v(self) -> Strided:
        return self.sides[1]

    @property
    def kv(self) -> int:
        """2, or 1 where there is one vector a token."""
        return 1 + self.sides[-1].kv

    @property
    def tensors(self) -> int:
        """Tensors per layer."""
        return 1 + self.sides[-1].tensor

    def elements(self, tensor: int = 0) -> int:
        """How many elements this tensor of a layer needs at least; padding after the last one is not needed."""
        return max(_extent(side, self.blocks) for side in self.sides if side.tensor == tensor)

    def only(self, start: int, stop: int) -> Bound:
        """The same cache, seen through heads ``[start, stop)`` alone. Raises LayoutError where they do not exist, or
        are not whole steps of an axis that is split by heads."""
        if not 0 <= start < stop <= self.heads:
            raise LayoutError(f"heads [{start}, {stop}) of a cache that has {self.heads}")
        if (start, stop) == (0, self.heads):
            return self
        return replace(self, sides=tuple(_only(side, start, stop) for side in self.sides), heads=stop - start)


def _only(side: Strided, start: int, stop: int) -> Strided:
    heads, *inner = side.of("head")
    first, rest = divmod(start, heads.unit)
    if rest or (stop - start) % heads.unit:
        raise LayoutError(f"heads [{start}, {stop}) of a layout that keeps {heads.unit} together")
    kept = Factor("head", (stop - start) // heads.unit, heads.unit, heads.stride)
    others = tuple(factor for factor in side.factors if factor.axis not in ("head",))
    block, tail = others[:1], others[1:]
    return replace(side, offset=side.offset + first * heads.stride, factors=(*block, kept, *inner, *tail))


def _extent(side: Strided, blocks: int) -> int:
    extents = ((blocks if factor.axis == "block" else factor.extent, factor.stride) for factor in side.factors)
    return side.offset + sum((extent - 1) * stride for extent, stride in extents) + 1


@dataclass(frozen=True, slots=True)
class Layout:
    """The parsed notation. Equal texts are equal layouts; different texts may still mean the same bytes."""

    items: tuple[Item, ...]
    tensors: Tensors = ONE_TENSOR

    @staticmethod
    def parse(text: str) -> Layout:
        """Raises LayoutError naming the place in the text."""
        tensors, items = parse(text)
        return Layout(items, tensors)

    def __str__(self) -> str:
        body = " ".join(map(str, self.items))
        return f"{self.tensors} | {body}" if self.tensors.by else body

    def bind(
        self,
        *,
        heads: int,
        head_dim: int,
        block_size: int,
        blocks: int = 1,
        strides: Mapping[str, int] | None = None,
    ) -> Bound:
        """Strides for these sizes.

        `strides` maps a factor as the text names it (``block``, ``dim/8``) to its stride in the live tensors, where
        that is wider than dense: aligned blocks, or layers inside a block. Factors outside it follow from it. Raises
        LayoutError where a factor does not divide its axis, or a stride is narrower than what lies inside it.
        """
        sizes = {"block": blocks, "kv": 2, "head": heads, "token": block_size, "dim": head_dim}
        if min(sizes.values()) < 1:
            raise LayoutError(f"layout {str(self)!r}: every size must be at least 1, not {sizes}")
        wide = strides or {}
        named = {str(axis) for side in _SIDES for axis in self._axes(side)}
        if unknown := sorted(set(wide) - named):
            raise LayoutError(f"layout {str(self)!r} has no {', '.join(unknown)} to give a stride to")
        sides = tuple(self._sides(sizes, wide))
        return Bound(
            tuple(side for side, _ in sides),
            heads,
            head_dim,
            block_size,
            blocks,
            sum({side.tensor: total for side, total in sides}.values()) // blocks,
        )

    def _axes(self, side: KV) -> list[Axis]:
        return list(flat(self.items, side, split=self.tensors.by != "kv"))

    def _sides(self, sizes: dict[str, int], wide: Mapping[str, int]) -> Iterator[tuple[Strided, int]]:
        text = str(self)
        k, v = (self._axes(side) for side in _SIDES)
        if self.tensors.by == "kv":
            yield _strided(k, sizes, wide, text)
            yield _strided(v, sizes, wide, text, tensor=1, kv=1)
        elif any(axis.name == "kv" for axis in k):
            after_k, _ = _strided(k, sizes, wide, text, kv=1)
            value = _strided(v, sizes, wide, text, kv=1)
            if after_k.offset != value[0].offset:
                raise LayoutError(f"layout {text!r}: with strides {dict(wide)}, K and V are unequal")
            yield _strided(k, sizes, wide, text)
            yield value
        elif sizes["head"] != 1:
            raise LayoutError(f"layout {text!r} has no head axis, so one head, not {sizes['head']}")
        elif self.tensors.by == "dim":
            if sum(self.tensors.parts) != sizes["dim"]:
                raise LayoutError(f"layout {text!r}: dim has {sizes['dim']}, which is not the sum of its parts")
            first = 0
            for tensor, dim in enumerate(self.tensors.parts):
                yield _strided(k, {**sizes, "dim": dim}, wide, text, tensor=tensor, first_dim=first)
                first += dim
        else:
            yield _strided(k, sizes, wide, text)


_SIDES: tuple[KV, KV] = ("k", "v")
_ORDER = {name: place for place, name in enumerate(("block", "head", "token", "dim"))}


def _strided(
    axes: list[Axis],
    sizes: dict[str, int],
    wide: Mapping[str, int],
    text: str,
    tensor: int = 0,
    kv: int = 0,
    first_dim: int = 0,
) -> tuple[Strided, int]:
    """Strides of one side, innermost outwards, and the number of elements of its tensor."""
    stride, offset = 1, 0
    factors: list[Factor] = []
    for axis in reversed(axes):
        size = sizes[axis.name]
        if axis.part and size % axis.factor:
            raise LayoutError(f"layout {text!r}: {axis.name} has {size}, which {axis} does not divide")
        if (given := wide.get(str(axis), stride)) < stride:
            raise LayoutError(f"layout {text!r}: a stride of {given} for {axis}, inside which are {stride} elements")
        stride = given
        if axis.name == "kv":
            # K and V have equal sizes, so wherever kv stands V is one run of its inner axes after K.
            offset = kv * stride
        else:
            factors.append(Factor(axis.name, axis.extent(size), axis.unit, stride))
        stride *= axis.extent(size)
    # Of an axis the quotient first; by 1, quotient and remainder have one unit and only the extent tells them apart.
    factors.sort(key=lambda factor: (_ORDER[factor.axis], -factor.unit, -factor.extent))
    return Strided(offset, tuple(factors), tensor, kv, first_dim), stride
