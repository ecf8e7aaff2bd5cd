"""Which engine, or which pair of engines, serves a request. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from deeplink.errors import InvalidRequest, NoEngine, Overloaded
from deeplink.kvconnector.contracts.contract import Contract
from deeplink.kvconnector.contracts.negotiate import Agreement, Refusal, negotiate
from deeplink.router import declared
from deeplink.router.engine import ALONE, Engine
from deeplink.router.policy import Work


@dataclass(frozen=True, slots=True)
class Plain:
    """One engine does all of it."""

    engine: Engine


@dataclass(frozen=True, slots=True)
class Pair:
    """Prefill here, decode there: two of one kind. `agreement` is that of their contracts, if they have any."""

    prefill: Engine
    decode: Engine
    agreement: Agreement | None = None

    @property
    def kind(self) -> str:
        return self.prefill.kind


@dataclass(frozen=True, slots=True)
class Table:
    """All engines, and which of those that are up can hand over to which; `partners` are the pairs by who prefills.
    Made once per change, not per request, and so is what follows from it.

    `kinds` are those of the engines that hand over; `split`: requests are to be (`splits`); `able` are the engines that
    are up and can serve a request that nobody prefills for them, `whole` those of them that can generate too.
    """

    engines: tuple[Engine, ...]
    pairs: tuple[Pair, ...]
    refused: tuple[tuple[Engine, Engine, Refusal], ...]
    partners: Mapping[str, tuple[Pair, ...]]
    kinds: frozenset[str] = field(init=False)
    split: bool = field(init=False)
    able: tuple[Engine, ...] = field(init=False)
    whole: tuple[Engine, ...] = field(init=False)

    def __post_init__(self) -> None:
        engines = self.engines
        only = len(engines) == 1 and not engines[0].foreign
        able = tuple(engine for engine in engines if not engine.down and (engine.alone or only))
        for name, value in (
            ("kinds", frozenset(engine.kind for engine in engines if not engine.plain)),
            ("split", splits(engines)),
            ("able", able),
            ("whole", tuple(engine for engine in able if engine.whole)),
        ):
            object.__setattr__(self, name, value)


def table(engines: Iterable[Engine], before: Table | None = None) -> Table:
    """What `before` says of two contracts holds still, so one engine's change costs its own row and column."""
    engines = tuple(engines)
    known = _answers(before) if before else {}
    pairs: list[Pair] = []
    refused: list[tuple[Engine, Engine, Refusal]] = []
    for producer in engines:
        for consumer in engines:
            if producer is consumer or producer.down or consumer.down:
                continue
            if producer.kind != consumer.kind or not (producer.produces and consumer.consumes):
                continue
            if producer.foreign:
                if (refusal := declared.refusal(producer, consumer)) is not None:
                    refused.append((producer, consumer, refusal))
                else:
                    pairs.append(Pair(producer, consumer))
                continue
            if producer.contract is None or consumer.contract is None:
                continue
            ours, theirs, answer = known.get((producer.name, consumer.name), (None, None, None))
            if answer is None or (ours, theirs) != (producer.contract, consumer.contract):
                answer = negotiate(producer.contract, consumer.contract)
            if isinstance(answer, Refusal):
                refused.append((producer, consumer, answer))
            else:
                pairs.append(Pair(producer, consumer, answer))
    partners: dict[str, tuple[Pair, ...]] = {}
    for pair in pairs:
        partners[pair.prefill.name] = (*partners.get(pair.prefill.name, ()), pair)
    return Table(engines, tuple(pairs), tuple(refused), partners)


Answers = dict[tuple[str, str], tuple[Contract | None, Contract | None, Agreement | Refusal]]


def _answers(of: Table) -> Answers:
    found: Answers = {}
    for pair in of.pairs:
        producer, consumer = pair.prefill, pair.decode
        if pair.agreement is not None:
            found[producer.name, consumer.name] = (producer.contract, consumer.contract, pair.agreement)
    for producer, consumer, refusal in of.refused:
        found[producer.name, consumer.name] = (producer.contract, consumer.contract, refusal)
    return found


@dataclass(frozen=True, slots=True)
class Shut:
    """Why an engine that is up gets no new request. `full` passes by itself and soon, so it is worth waiting for.
    `doubted`: it has failed, but is better than none, for what failed may have been the requests."""

    why: str
    full: bool = False
    doubted: bool = False


Pick = Callable[[Work, Sequence[Engine]], Engine]
"""Takes one of several engines, each of which could do this work."""


def choose(
    of: Table,
    *,
    handoff: bool,
    generates: bool = False,
    pick: Pick,
    shut: Mapping[str, Shut] = MappingProxyType({}),
    avoid: frozenset[str] = frozenset(),
    barred: Mapping[str, str] = MappingProxyType({}),
) -> Plain | Pair:
    """The engine or pair that `pick` takes: first who prefills, then who decodes with what that one hands over.

    With `handoff` the request is split where the engines are meant for that (`splits`), and without it where no engine
    can serve alone; but not between engines of the kinds in `barred`, which say by which field of the request. One that
    `generates` and is not split needs an engine that does all of it (`Engine.whole`). Engines in `avoid` are taken only
    if there is no other, those in `shut` never, unless all are only doubted. Raises Overloaded if only full ones are
    left; NoEngine, naming who is down or shut and why; if every pair refuses, the Refused that says in which field; or
    InvalidRequest, if only a pair could serve it and the request's field bars it.
    """
    if handoff and of.split and (not barred or not _all_barred(of, barred)):
        return _pair(_without(of, barred), pick, shut, avoid)
    usable: Sequence[Engine] = of.able
    if not usable:
        if any(engine.consumes and not engine.down for engine in of.engines) and of.pairs:
            if not _all_barred(of, barred):
                return _pair(_without(of, barred), pick, shut, avoid)
            field = barred[of.pairs[0].kind]
            raise InvalidRequest(
                f"the engines that are up serve in pairs only, and this request cannot be handed over: {field}",
                field=field,
            )
        raise _none("decode", of.engines)
    if generates and not (usable := of.whole):
        raise NoEngine(
            "no engine that is up can serve this request by itself, and it is not one that is handed over",
            remedy="ask for one answer to one prompt, or add an engine that both prefills and decodes",
        )
    return Plain(pick("decode", _preferred(_open(usable, _name, shut), _name, avoid)))


def readers(of: Table, pair: Pair, shut: Mapping[str, Shut], avoid: frozenset[str]) -> list[Pair]:
    """The pairs whose decode engine could fetch what `pair.prefill` has staged for `pair.decode`: what travels, and who
    fetches which part, was settled when it was staged."""
    return [
        other
        for other in of.pairs
        if other.prefill == pair.prefill
        and other.decode.name not in avoid
        and other.decode.name not in shut
        and _travels(other) == _travels(pair)
    ]


def _travels(pair: Pair) -> object:
    return None if pair.agreement is None else (pair.agreement.takes, pair.agreement.wire)


def _all_barred(of: Table, barred: Mapping[str, str]) -> bool:
    kinds = {pair.kind for pair in of.pairs} or {engine.kind for engine in of.engines if not engine.plain}
    return kinds <= barred.keys()


def _without(of: Table, barred: Mapping[str, str]) -> Table:
    if not barred or not any(pair.kind in barred for pair in of.pairs):
        return of
    pairs = tuple(pair for pair in of.pairs if pair.kind not in barred)
    partners = {name: mine for name, mine in of.partners.items() if mine[0].kind not in barred}
    return Table(of.engines, pairs, of.refused, partners)


def splits(engines: Sequence[Engine]) -> bool:
    """Whether requests are to be handed over, or each served by one engine.

    An engine with role prefill is there to prefill for others, one with role decode to be prefilled for;
    engines that are all `both` serve each on its own. Being down does not change what an engine is for. One
    that was never seen may be the missing prefill engine, so without one that can do both it counts as such:
    better no answer than decode engines that silently do all the work. Plain engines hand nothing over.
    """
    if len(engines) < 2:
        return False
    roles = {engine.role for engine in engines if not engine.plain and engine.role != ALONE}
    alone = "both" in roles or any(engine.plain or engine.role == ALONE for engine in engines)
    return "prefill" in roles or {"both", "decode"} <= roles or ("" in roles and not alone)


def _pair(of: Table, pick: Pick, shut: Mapping[str, Shut], avoid: frozenset[str]) -> Pair:
    if of.pairs:
        partners: Mapping[str, Sequence[Pair]] = of.partners
        if shut or avoid:
            left: dict[str, list[Pair]] = {}
            for pair in _preferred(_open(of.pairs, _names, shut), _names, avoid):
                left.setdefault(pair.prefill.name, []).append(pair)
            partners = left
        producer = pick("prefill", [pairs[0].prefill for pairs in partners.values()])
        pairs = partners[producer.name]
        consumer = pick("decode", [pair.decode for pair in pairs])
        return next(pair for pair in pairs if pair.decode is consumer)
    if of.refused:
        producer, consumer, refusal = of.refused[0]
        raise refusal.error(producer.name, consumer.name)
    up = [engine for engine in of.engines if not engine.down]
    producing, consuming = any(e.produces for e in up), any(e.consumes for e in up)
    # Both, and yet no pair: one engine that does both is up alone. What is missing is what the others do.
    alone = consuming and _down(of.engines, "prefill")
    raise _none("decode" if producing and not alone else "prefill", of.engines)


def _down(engines: Sequence[Engine], work: Work) -> list[Engine]:
    """The engines that might do this work if they were up."""
    able = {"prefill": ("prefill", "both", ""), "decode": ("decode", "both", "")}[work]
    return [e for e in engines if e.down and e.role in able and not (e.plain and work == "prefill")]


def _none(work: Work, engines: Sequence[Engine]) -> NoEngine:
    if not engines:
        return NoEngine("no engine is configured", remedy="list the engines in deeplink.toml under [[engines]]")
    why = ", ".join(f"{engine.name} ({engine.down})" for engine in _down(engines, work))
    if not why:
        return NoEngine(f"no engine that can {work} is configured", remedy=f"start one with role {work} or both")
    return NoEngine(f"no engine that can {work} is up: {why}")


T = TypeVar("T")


def _name(engine: Engine) -> tuple[str, ...]:
    return (engine.name,)


def _names(pair: Pair) -> tuple[str, ...]:
    return pair.prefill.name, pair.decode.name


def _open(options: Sequence[T], names: Callable[[T], tuple[str, ...]], shut: Mapping[str, Shut]) -> Sequence[T]:
    """The options none of whose engines is shut, else those whose are only doubted; at least one."""
    if not shut:
        return options
    found = [option for option in options if not shut.keys() & names(option)]
    if found:
        return found
    shuts = [[shut[name] for name in names(option) if name in shut] for option in options]
    found = [option for option, mine in zip(options, shuts, strict=True) if all(one.doubted for one in mine)]
    if found:
        return found
    if any(all(one.full or one.doubted for one in mine) for mine in shuts):
        raise Overloaded("all engines that could take the request are full")
    whose = sorted({name for option in options for name in names(option) if name in shut})
    raise NoEngine("no engine takes requests now: " + ", ".join(f"{name} ({shut[name].why})" for name in whose))


def _preferred(options: Sequence[T], names: Callable[[T], tuple[str, ...]], avoid: frozenset[str]) -> Sequence[T]:
    """Those with the fewest engines to be avoided."""
    if not avoid:
        return options
    counts = [len(avoid.intersection(names(option))) for option in options]
    least = min(counts)
    return [option for option, count in zip(options, counts, strict=True) if count == least]
