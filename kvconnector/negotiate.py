"""Two contracts in, an agreement or a refusal out. Pure, so both engines and the router reach the same answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deeplink.errors import LayoutError, Refused
from deeplink.kvconnector.contract import CacheGroup, Contract, place
from deeplink.kvconnector.layout import DTYPES, RECORDS, Bound, Layout


@dataclass(frozen=True, slots=True)
class Agreement:
    """How one producer's cache becomes one consumer's.

    `exact` says that every byte of the requested tokens arrives unchanged. `transport` is the first of the
    producer's transports, in its order of preference, by which the two reach each other.
    """

    exact: bool
    transport: str

    def __str__(self) -> str:
        return f"{'exact' if self.exact else 'lossy'} over {self.transport}"


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


def negotiate(producer: Contract, consumer: Contract) -> Agreement | Refusal:
    """Whether `producer` can hand its cache to `consumer`.

    The order of the checks is the order an operator would want to hear about them: who, which model, which
    cache, which ranks, which transport.
    """
    for refusal in refusals(producer, consumer):
        return refusal
    (name, *_) = _common_transports(producer, consumer)
    return Agreement(exact=True, transport=name)


def refusals(producer: Contract, consumer: Contract) -> Iterator[Refusal]:
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
    if len(producer.groups) != len(consumer.groups):
        yield Refusal(
            "groups",
            str(len(producer.groups)),
            str(len(consumer.groups)),
            "start both engines with the same hybrid-cache setting",
        )
    for index, (ours_g, theirs_g) in enumerate(zip(producer.groups, consumer.groups, strict=False)):
        yield from _group_refusals(f"groups[{index}]", ours_g, theirs_g)
    for side in (producer, consumer):
        if len(side.ranks) != 1:
            yield Refusal(
                "ranks",
                str(len(producer.ranks)),
                str(len(consumer.ranks)),
                "handoff between tensor- or pipeline-parallel engines is not supported by this release",
            )
    if not _common_transports(producer, consumer):
        yield Refusal(
            "transports",
            _describe(producer),
            _describe(consumer),
            "install a transport that both sides have, and that reaches from one to the other",
        )


def _group_refusals(where: str, ours: CacheGroup, theirs: CacheGroup) -> Iterator[Refusal]:
    for name in ("kind", "layers", "heads", "head_dim"):
        if getattr(ours, name) != getattr(theirs, name):
            yield Refusal(
                f"{where}.{name}",
                str(getattr(ours, name)),
                str(getattr(theirs, name)),
                "serve the same model with the same cache settings on both engines",
            )
    if ours.dtype != theirs.dtype:
        yield Refusal(
            f"{where}.dtype",
            ours.dtype,
            theirs.dtype,
            "start both engines with the same --dtype; this release casts nothing",
        )
    bounds: list[Bound] = []
    for group in (ours, theirs):
        if group.dtype not in DTYPES:
            yield Refusal(f"{where}.dtype", ours.dtype, theirs.dtype, f"known: {', '.join(DTYPES)}")
        if group.head_dim != RECORDS.get(group.dtype, group.head_dim):
            remedy = f"a record of {group.dtype} has {RECORDS[group.dtype]} bytes"
            yield Refusal(f"{where}.head_dim", str(ours.head_dim), str(theirs.head_dim), remedy)
        try:
            layout = Layout.parse(group.layout)
            bounds.append(layout.bind(heads=group.heads, head_dim=group.head_dim, block_size=group.block_size))
        except LayoutError as exc:
            yield Refusal(f"{where}.layout", ours.layout, theirs.layout, str(exc))
    if len({bound.kv for bound in bounds}) > 1:
        remedy = "one of them keeps K and V, the other one vector a token; use the same attention on both engines"
        yield Refusal(f"{where}.layout", ours.layout, theirs.layout, remedy)


def _common_transports(producer: Contract, consumer: Contract) -> list[str]:
    theirs = consumer.ranks[0].transports
    return [
        name
        for name, address in producer.ranks[0].transports.items()
        if name in theirs and place(address) == place(theirs[name])
    ]


def _describe(contract: Contract) -> str:
    """The transports, each with the place it is confined to: two of one name may differ in that alone."""
    items = contract.ranks[0].transports.items()
    return ", ".join(f"{name} within {place(address)}" if place(address) else name for name, address in items)
