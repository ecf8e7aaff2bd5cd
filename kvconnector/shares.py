"""Who gives which part of the cache to whom: one handoff is producer ranks times consumer ranks. Pure.

A rank holds some layers and, of each cache group, some heads. Where a model has fewer KV heads than an engine has
ranks, several ranks hold the same heads. A consumer rank goes through producer ranks in a fixed order and takes from
each what it still lacks, so it gets each (layer, head) exactly once, whatever the two engines' parallel sizes are.

The router works this out for all ranks when it mints a ticket (`takes`), and each consumer rank again for itself from
what its sources state on the channel (`Needs`). Same order, same code, same answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deeplink.kvconnector.contract import CacheGroup, Contract, Rank

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


class Needs:
    """What one consumer rank still lacks, of what it holds."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._missing: dict[tuple[int, int], list[Range]] = {
            (index, layer): [heads] for index, (layers, heads) in enumerate(held) for layer in layers
        }

    @property
    def missing(self) -> str:
        """What is not covered yet, for people; empty when all is."""
        for (group, layer), ranges in self._missing.items():
            if ranges:
                return f"heads {_text(ranges)} of layer {layer} in groups[{group}]"
        return ""

    def take(self, held: Sequence[Held]) -> tuple[Share, ...]:
        """What a producer rank that holds this has of it; from now on that is covered."""
        found: dict[tuple[int, int, Range], list[int]] = {}
        for ours, (layers, has) in enumerate(held):
            for (theirs, layer), missing in list(self._missing.items()):
                if layer in layers:
                    for heads in _common(missing, has):
                        found.setdefault((ours, theirs, heads), []).append(layer)
                    self._missing[theirs, layer] = list(_without(missing, has))
                    if not self._missing[theirs, layer]:
                        del self._missing[theirs, layer]
        return tuple(Share(ours, theirs, tuple(layers), heads) for (ours, theirs, heads), layers in found.items())


def held(groups: Sequence[CacheGroup], rank: Rank) -> tuple[Held, ...]:
    """What a rank holds of each group."""
    first, last = rank.layers
    return tuple(
        (tuple(layer for layer in group.layers if first <= layer < last), heads)
        for group, heads in zip(groups, rank.heads, strict=True)
    )


def takes(
    producer: Contract, consumer: Contract, producer_dp: int = 0, consumer_dp: int = 0
) -> tuple[tuple[tuple[int, ...], ...], str]:
    """For each rank of the consumer, which of the producer's ranks it takes from, in order; and what is missing.

    Ranks are numbered within their data-parallel replica. The text is empty when every rank gets all it needs.
    """
    sources = [held(producer.groups, rank) for rank in ranks(producer, producer_dp)]
    taken: list[tuple[int, ...]] = []
    for place, target in enumerate(ranks(consumer, consumer_dp)):
        needs = Needs(held(consumer.groups, target))
        # Each starts at another rank, so that copies of the same heads are read evenly.
        order = [(place + step) % len(sources) for step in range(len(sources))]
        taken.append(tuple(index for index in order if needs.missing and needs.take(sources[index])))
        if needs.missing:
            return (), needs.missing
    return tuple(taken), ""


def ranks(contract: Contract, dp: int = 0) -> tuple[Rank, ...]:
    """The ranks of one data-parallel replica, in the contract's order; a ticket counts them so."""
    return tuple(rank for rank in contract.ranks if rank.dp == dp)


def _common(ranges: Sequence[Range], held: Range) -> Iterator[Range]:
    for start, stop in ranges:
        first, last = max(start, held[0]), min(stop, held[1])
        if first < last:
            yield first, last


def _without(ranges: Sequence[Range], held: Range) -> Iterator[Range]:
    for start, stop in ranges:
        for first, last in ((start, min(stop, held[0])), (max(start, held[1]), stop)):
            if first < last:
                yield first, last


def _text(ranges: Sequence[Range]) -> str:
    return ", ".join(f"[{start}, {stop})" for start, stop in ranges)
