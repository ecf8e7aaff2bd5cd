"""Who gives which part of the cache to whom: one handoff is producer ranks times consumer ranks. Pure.

A rank holds some layers and, of each cache group, some heads. Where a model has fewer KV heads than an engine has
ranks, several ranks hold the same heads. A consumer rank goes through producer ranks in a fixed order and takes from
each what it still lacks, so it gets each (layer, head) exactly once, whatever the two engines' parallel sizes are.

The router works this out for all ranks when it mints a ticket (`takes`), and each consumer rank again for itself from
what its sources state on the channel (`Needs`). Same order, same code, same answer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deeplink.kvconnector.contracts.contract import CacheGroup, Contract, Rank

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Share:
    """What one source gives to one target: `heads` of `layers`, from the producer's group `ours` to the consumer's
    group `theirs`. Layers and heads are numbered as in the whole model."""

    ours: int
    theirs: int
    layers: tuple[int, ...]
    heads: Range


Held = tuple[tuple[int, ...], Range]
"""What a rank holds of one cache group: which layers, and which heads of each."""
_Bits = tuple[int, Range]
"""The same with the layers as bits."""


class _Lack:
    """What is missing of several groups, each a set of layers (bits) with one range of heads.

    Layers that lack the same heads are one entry, so that the work does not grow with their number.
    """

    def __init__(self, targets: Iterable[_Bits]) -> None:
        self.entries: dict[tuple[int, Range], int] = {}
        for index, (layers, heads) in enumerate(targets):
            if layers and heads[0] < heads[1]:
                self.entries[index, heads] = layers

    def take(self, sources: Iterable[tuple[int, _Bits]]) -> dict[tuple[int, int, Range], int]:
        """By (source's group, group, heads), the layers that a source has of it; from now on they are not missing."""
        found: dict[tuple[int, int, Range], int] = {}
        for ours, (layers, has) in sources:
            for (theirs, lacked), missing in list(self.entries.items()):
                common = missing & layers
                first, last = max(lacked[0], has[0]), min(lacked[1], has[1])
                if not common or first >= last:
                    continue
                found[ours, theirs, (first, last)] = found.get((ours, theirs, (first, last)), 0) | common
                self._set(theirs, lacked, missing & ~common)
                for rest in ((lacked[0], first), (last, lacked[1])):
                    if rest[0] < rest[1]:
                        self._set(theirs, rest, self.entries.get((theirs, rest), 0) | common)
        return found

    def _set(self, theirs: int, heads: Range, layers: int) -> None:
        if layers:
            self.entries[theirs, heads] = layers
        else:
            del self.entries[theirs, heads]


class _Numbers:
    """Layers as bits of an integer, in the order of their numbers; layers that nobody needs have none."""

    def __init__(self, layers: Iterable[int]) -> None:
        self._layers = sorted(set(layers))
        self._place = {layer: place for place, layer in enumerate(self._layers)}

    def bits(self, layers: Iterable[int]) -> int:
        """Those of these layers that are known."""
        chosen = bytearray(-(-len(self._layers) // 8))
        for layer in layers:
            if (place := self._place.get(layer)) is not None:
                chosen[place >> 3] |= 1 << (place & 7)
        return int.from_bytes(chosen, "little")

    def between(self, first: int, last: int) -> int:
        """All from layer `first` to before `last`."""
        low, high = bisect_left(self._layers, first), bisect_left(self._layers, last)
        return ((1 << high) - 1) & ~((1 << low) - 1) if low < high else 0

    def first(self, bits: int) -> int:
        return self._layers[(bits & -bits).bit_length() - 1]

    def has(self, bits: int, layer: int) -> bool:
        place = self._place.get(layer)
        return place is not None and bool(bits >> place & 1)


class Needs:
    """What one consumer rank still lacks, of what it holds."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._numbers = _Numbers(layer for layers, _ in held for layer in layers)
        self._lack = _Lack((self._numbers.bits(layers), heads) for layers, heads in held)

    @property
    def missing(self) -> str:
        """What is not covered yet, for people; empty when all is."""
        return _missing(self._numbers, self._lack)

    def take(self, held: Sequence[Held]) -> tuple[Share, ...]:
        """What a producer rank that holds this has of it; from now on that is covered."""
        numbers = self._numbers
        found = self._lack.take((index, (numbers.bits(layers), heads)) for index, (layers, heads) in enumerate(held))
        return tuple(
            Share(ours, theirs, tuple(layer for layer in held[ours][0] if numbers.has(bits, layer)), heads)
            for (ours, theirs, heads), bits in found.items()
        )


def held(groups: Sequence[CacheGroup], rank: Rank) -> tuple[Held, ...]:
    """What a rank holds of each group."""
    first, last = rank.layers
    return tuple(
        (tuple(layer for layer in group.layers if first <= layer < last), heads)
        for group, heads in zip(groups, rank.heads, strict=True)
    )


def takes(
    producer: Contract, consumer: Contract, producer_dp: int | None = None, consumer_dp: int | None = None
) -> tuple[tuple[tuple[int, ...], ...], str]:
    """For each rank of the consumer, which of the producer's ranks it takes from, in order; and what is missing.

    Ranks are numbered within their data-parallel replica, by default the first. The text is empty when every
    rank gets all it needs.
    """
    numbers = _numbers(consumer)
    return _match(numbers, _replica(numbers, producer, producer_dp), _replica(numbers, consumer, consumer_dp))


def gap(producer: Contract, consumer: Contract) -> str:
    """What a rank of some data-parallel replica would not get from some replica of the producer; empty when all do."""
    numbers = _numbers(consumer)
    sources, targets = (
        # Once more by what of the consumer's layers they hold: what else they do makes no difference here.
        {tuple(map(tuple, made)): made for made in (_replica(numbers, side, dp) for dp in _unlike(side))}.values()
        for side in (producer, consumer)
    )
    found = (_match(numbers, ours, theirs)[1] for ours in sources for theirs in targets)
    return next(filter(None, found), "")


def work(producer: Contract, consumer: Contract) -> int:
    """What `gap` costs at most, in steps of about a microsecond."""
    counts = [Counter(rank.dp for rank in side.ranks) for side in (producer, consumer)]
    ours, theirs = (
        sum(count[dp] for dp in _unlike(side)) * len(side.groups)
        for side, count in zip((producer, consumer), counts, strict=True)
    )
    return ours * theirs


def ranks(contract: Contract, dp: int | None = None) -> tuple[Rank, ...]:
    """The ranks of one data-parallel replica, by default the first, in the contract's order: a ticket counts so."""
    dp = min(rank.dp for rank in contract.ranks) if dp is None else dp
    return tuple(rank for rank in contract.ranks if rank.dp == dp)


def _unlike(contract: Contract) -> list[int]:
    """One data-parallel replica of each kind; usually they are all alike."""
    replicas: dict[int, list[tuple[object, ...]]] = {}
    for rank in contract.ranks:
        replicas.setdefault(rank.dp, []).append((rank.heads, rank.layers))
    kinds: dict[tuple[tuple[object, ...], ...], int] = {}
    for dp in sorted(replicas):
        kinds.setdefault(tuple(replicas[dp]), dp)
    return list(kinds.values())


def _numbers(consumer: Contract) -> _Numbers:
    return _Numbers(layer for group in consumer.groups for layer in group.layers)


def _replica(numbers: _Numbers, contract: Contract, dp: int | None) -> list[list[_Bits]]:
    """What each rank of a replica holds of each group."""
    layers = [numbers.bits(group.layers) for group in contract.groups]
    return [
        [(bits & numbers.between(*rank.layers), heads) for bits, heads in zip(layers, rank.heads, strict=True)]
        for rank in ranks(contract, dp)
    ]


def _match(
    numbers: _Numbers, sources: Sequence[Sequence[_Bits]], targets: Sequence[Sequence[_Bits]]
) -> tuple[tuple[tuple[int, ...], ...], str]:
    held = [[(index, bits) for index, bits in enumerate(source) if bits[0]] for source in sources]
    taken: list[tuple[int, ...]] = []
    for place, target in enumerate(targets):
        lack = _Lack(target)
        found: list[int] = []
        # Each starts at another rank, so that copies of the same heads are read evenly.
        for step in range(len(held)):
            if not lack.entries:
                break
            index = (place + step) % len(held)
            if lack.take(held[index]):
                found.append(index)
        if lack.entries:
            return (), _missing(numbers, lack)
        taken.append(tuple(found))
    return tuple(taken), ""


def _missing(numbers: _Numbers, lack: _Lack) -> str:
    """What is not covered, for people; empty when all is."""
    for (group, _), bits in lack.entries.items():
        ranges = sorted(heads for (of, heads), others in lack.entries.items() if of == group and others & bits)
        return f"heads {_text(ranges)} of layer {numbers.first(bits)} in groups[{group}]"
    return ""


def _text(ranges: Sequence[Range]) -> str:
    return ", ".join(f"[{start}, {stop})" for start, stop in ranges)
