"""Two contracts in, an agreement or a refusal out. Pure, so both engines and the router reach the same answer."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from deeplink.errors import ConfigError, LayoutError, Refused
from deeplink.kvconnector.contracts import forms, shares
from deeplink.kvconnector.contracts.contract import CacheGroup, Contract, Rank, place
from deeplink.kvconnector.contracts.forms import Conversion
from deeplink.kvconnector.layouts.cast import Cast, parse_consent
from deeplink.kvconnector.layouts.layout import RECORDS, Bound, Layout

FULL, SLIDING, STATE = "full", "sliding", "state"
KINDS = (FULL, SLIDING, STATE)
MOST_WORK = 1 << 22
"""Ranks times ranks times cache groups times cache groups that are matched: seconds, whatever two contracts say."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How one producer's cache becomes one consumer's.

    `exact` says that every value of the requested tokens arrives unchanged; else `casts` says which casts are made,
    each with its bound. `transport` names those that will be used: for each two ranks the first of the producer's, in
    its order of preference, by which they reach each other. `wire` is the element type in which each of the producer's
    cache groups travels, and `takes` which of the producer's ranks each of the consumer's takes from.
    """

    exact: bool
    transport: str
    wire: tuple[str, ...] = ()
    casts: tuple[Cast, ...] = ()
    takes: tuple[tuple[int, ...], ...] = ((0,),)

    def __str__(self) -> str:
        made = "; ".join(f"{cast.name}: {cast.bound}" for cast in self.casts)
        return f"{'exact' if self.exact else 'lossy'} over {self.transport}{f' ({made})' if made else ''}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The first field in which the two differ; `ours` is the producer's value, `theirs` the consumer's."""

    field: str
    ours: str
    theirs: str
    remedy: str

    def error(self, producer: str, consumer: str) -> Refused:
        return Refused(
            f"{producer} cannot hand its KV cache to {consumer}: {self.field} differs",
            field=self.field,
            ours=self.ours,
            theirs=self.theirs,
            remedy=self.remedy,
        )


def negotiate(producer: Contract, consumer: Contract, *, whole: bool = True) -> Agreement | Refusal:
    """Whether `producer` can hand its cache to `consumer`.

    The order of the checks is the order an operator would want to hear about them: who, which model, which
    cache, which ranks, which transport. Without `whole`, each contract names only one rank of its engine (as they do on
    a channel), and whether all ranks together have every head and layer is not looked at.
    """
    for refusal in refusals(producer, consumer, whole=whole):
        return refusal
    conversions = [(ours, found) for ours, _, found in _conversions(producer, consumer) if found is not None]
    made = {found.cast.name: found.cast for _, found in conversions if found.cast is not None}
    return Agreement(
        exact=all(found.exact for _, found in conversions),
        transport=", ".join(dict.fromkeys(name for name in _transports(producer, consumer) if name)),
        wire=tuple(_wire(index, group, conversions) for index, group in enumerate(producer.groups)),
        casts=tuple(made.values()),
        takes=shares.takes(producer, consumer)[0] if whole else ((0,),),
    )


def refusals(producer: Contract, consumer: Contract, *, whole: bool = True) -> Iterator[Refusal]:
    """Everything that speaks against it, in the order of `negotiate`, which answers with the first."""
    if not producer.produces:
        yield Refusal("role", producer.role, consumer.role, "start the first engine with role prefill or both")
    if not consumer.consumes:
        yield Refusal("role", producer.role, consumer.role, "start the second engine with role decode or both")
    if producer.epoch == consumer.epoch:
        yield Refusal("epoch", producer.epoch, consumer.epoch, "an engine cannot hand over to itself")
    for name in producer.model.__struct_fields__:
        ours, theirs = getattr(producer.model, name), getattr(consumer.model, name)
        if ours != theirs:
            yield Refusal(f"model.{name}", str(ours), str(theirs), "serve the same checkpoint on both engines")
    groups = list(_group_refusals(producer, consumer, whole=whole))
    yield from groups
    yield from _rank_refusals(producer, consumer, whole=whole and not groups)
    if not all(_transports(producer, consumer)):
        yield Refusal(
            "transports",
            _describe(producer),
            _describe(consumer),
            "install a transport that both sides have, and that reaches from one to the other",
        )


def _group_refusals(producer: Contract, consumer: Contract, *, whole: bool) -> Iterator[Refusal]:
    understood = True
    for side in (producer, consumer):
        if len(_layers(side)) < sum(len(group.layers) for group in side.groups):
            understood = False
            counts = str(len(producer.groups)), str(len(consumer.groups))
            yield Refusal(
                "groups", counts[0], counts[1], "a layer belongs to one cache group; this contract has one in two"
            )
    for index in range(max(len(producer.groups), len(consumer.groups))):
        for refusal in _one_by_one(index, producer.groups[index : index + 1], consumer.groups[index : index + 1]):
            understood = False
            yield refusal
    ours_l, theirs_l = _layers(producer), _layers(consumer)
    for index in range(max(len(producer.groups), len(consumer.groups)) if whole else 0):
        sides = [side.groups[index].layers if index < len(side.groups) else () for side in (producer, consumer)]
        if not (theirs_l.issuperset(sides[0]) and ours_l.issuperset(sides[1])):
            remedy = "serve the same layers of the model on both engines"
            yield Refusal(f"groups[{index}].layers", str(sides[0]), str(sides[1]), remedy)
    for index, theirs, found in _conversions(producer, consumer) if understood else ():
        yield from _pair_refusals(index, producer, consumer, theirs, found)


def _one_by_one(index: int, ours: Sequence[CacheGroup], theirs: Sequence[CacheGroup]) -> Iterator[Refusal]:
    """What is wrong with a group by itself, on either side; the other's value is shown beside it."""
    for group in (*ours, *theirs):
        field, remedy = forms.problem(group)
        if group.kind not in KINDS:
            field, remedy = "kind", f"known: {', '.join(KINDS)}"
        elif group.kind == SLIDING and group.window == 0:
            field, remedy = "window", "a sliding window has at least one token"
        elif group.head_dim != RECORDS.get(group.dtype, group.head_dim):
            field, remedy = "head_dim", f"a record of {group.dtype} has {RECORDS[group.dtype]} bytes"
        else:
            try:
                bind(group, group.heads)
            except LayoutError as exc:
                field, remedy = field or "layout", remedy or str(exc)
        if field:
            texts = [str(getattr(side[0], field)) if side else "" for side in (ours, theirs)]
            yield Refusal(f"groups[{index}].{field}", texts[0], texts[1], remedy)


def _pair_refusals(
    index: int, producer: Contract, consumer: Contract, theirs_g: CacheGroup, found: Conversion | None
) -> Iterator[Refusal]:
    """What keeps the producer's group `index` from filling the consumer's group, which has some of the same layers."""
    ours_g, where = producer.groups[index], f"groups[{index}]"
    same = "serve the same model with the same cache settings on both engines"
    # A full cache has what a sliding one wants.
    names = (
        ("heads", "head_dim")
        if (ours_g.kind, theirs_g.kind) == (FULL, SLIDING)
        else ("kind", "window", "heads", "head_dim")
    )
    for name in names:
        if getattr(ours_g, name) != getattr(theirs_g, name):
            yield Refusal(f"{where}.{name}", str(getattr(ours_g, name)), str(getattr(theirs_g, name)), same)
    if bind(ours_g, ours_g.heads).kv != bind(theirs_g, theirs_g.heads).kv:
        remedy = "one of them keeps K and V, the other one vector a token; use the same attention on both engines"
        yield Refusal(f"{where}.layout", ours_g.layout, theirs_g.layout, remedy)
    if found is None:
        remedy = "start both engines with the same KV-cache dtype; nothing casts one to the other"
        yield Refusal(f"{where}.dtype", ours_g.dtype, theirs_g.dtype, remedy)
    elif STATE in (ours_g.kind, theirs_g.kind) and found.cast is not None:
        yield Refusal(f"{where}.dtype", ours_g.dtype, theirs_g.dtype, "a state is moved as it is, never cast")
    elif found.cast is not None and not found.exact and not _consented(found.cast, producer, consumer):
        name = "dtype" if ours_g.dtype != theirs_g.dtype else "scales"
        texts = [str(getattr(group, name)) for group in (ours_g, theirs_g)]
        remedy = (
            "start both engines with the same KV-cache dtype and scales, or consent to the loss on both: "
            f'casts = ["{found.cast.name}"] under [kv] ({found.cast.bound})'
        )
        yield Refusal(f"{where}.{name}", texts[0], texts[1], remedy)


def _consented(cast: Cast, *sides: Contract) -> bool:
    return all(any(_covers(text, cast) for text in side.casts) for side in sides)


def _covers(text: str, cast: Cast) -> bool:
    with contextlib.suppress(ConfigError):  # what a peer lists and this release does not know consents to nothing
        return parse_consent(text).covers(cast)
    return False


def _rank_refusals(producer: Contract, consumer: Contract, *, whole: bool) -> Iterator[Refusal]:
    counts = sizes(producer), sizes(consumer)
    for side in (producer, consumer):
        if any(len(rank.heads) != len(side.groups) for rank in side.ranks):
            yield Refusal("ranks", counts[0], counts[1], "a rank states its heads for each cache group")
            return
        for first, last in {heads for rank in side.ranks for heads in rank.heads}:
            if first >= last:
                remedy = f"a rank says that it has heads [{first}, {last})"
                yield Refusal("ranks", counts[0], counts[1], remedy)
                return
        if any(group.kind == STATE for group in side.groups) and len(side.ranks) > 1:
            yield Refusal(
                "ranks", counts[0], counts[1], "a state is not cut into heads; run both engines with one rank"
            )
    if not whole:
        return
    if shares.work(producer, consumer) > MOST_WORK:
        remedy = "so many ranks and cache groups are not matched with each other"
        yield Refusal("ranks", counts[0], counts[1], remedy)
    elif missing := shares.gap(producer, consumer):
        yield Refusal("ranks", counts[0], counts[1], f"no rank of the prefill engine has {missing}")


def sizes(contract: Contract) -> str:
    """How many ranks there are of each kind, for people."""
    kinds = ("tp", "pp", "dp")
    return ", ".join(f"{kind} {len({getattr(rank, kind) for rank in contract.ranks})}" for kind in kinds)


def _layers(contract: Contract) -> set[int]:
    return {layer for group in contract.groups for layer in group.layers}


def bind(group: CacheGroup, heads: int, blocks: int = 1) -> Bound:
    """The group's layout for a rank that has `heads` of its heads. Raises LayoutError."""
    layout = Layout.parse(group.layout)
    if group.scales is not None and group.scales.layout:
        Layout.parse(group.scales.layout).bind(heads=heads, head_dim=1, block_size=group.block_size)
    return layout.bind(heads=heads, head_dim=group.head_dim, block_size=group.block_size, blocks=blocks)


def _conversions(producer: Contract, consumer: Contract) -> Iterator[tuple[int, CacheGroup, Conversion | None]]:
    """For every two groups that have layers in common: the producer's by its place, the consumer's, and what it
    takes."""
    where = {layer: at for at, group in enumerate(consumer.groups) for layer in group.layers}
    for index, ours in enumerate(producer.groups):
        for at in sorted({where[layer] for layer in ours.layers if layer in where}):
            theirs = consumer.groups[at]
            yield index, theirs, forms.conversion(ours, theirs)


def _wire(index: int, group: CacheGroup, conversions: Sequence[tuple[int, Conversion]]) -> str:
    """A group is staged once, so where consumers' groups want it in several types it travels as it is."""
    wanted = {found.wire for ours, found in conversions if ours == index}
    return wanted.pop() if len(wanted) == 1 else group.dtype


def transport(ours: Rank, theirs: Rank) -> str:
    """The first of our transports by which this rank reaches the other; empty when there is none."""
    return _first(_places(ours), _places(theirs))


Places = tuple[tuple[str, str], ...]


def _places(rank: Rank) -> Places:
    """The names of its transports, each with the place it is confined to."""
    return tuple((name, place(address)) for name, address in rank.transports.items())


def _first(ours: Places, theirs: Collection[tuple[str, str]]) -> str:
    return next((at[0] for at in ours if at in theirs), "")


def _transports(producer: Contract, consumer: Contract) -> Iterator[str]:
    """One for each two kinds of ranks, which are usually all alike."""
    theirs = [frozenset(one) for one in dict.fromkeys(map(_places, consumer.ranks))]
    for ours in dict.fromkeys(map(_places, producer.ranks)):
        for one in theirs:
            yield _first(ours, one)


def _describe(contract: Contract) -> str:
    """The transports, each with the place it is confined to: two of one name may differ in that alone."""
    found: dict[str, None] = {}
    for rank in contract.ranks:
        for name, address in rank.transports.items():
            found[f"{name} within {place(address)}" if place(address) else name] = None
    return ", ".join(found)
