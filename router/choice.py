"""Which engine, or which pair of engines, serves a request. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from deeplink.errors import NoEngine, Overloaded
from deeplink.kvconnector.contract import Contract
from deeplink.kvconnector.negotiate import Agreement, Refusal, negotiate
from deeplink.router.policy import Work


@dataclass(frozen=True, slots=True)
class Engine:
    """What is known about one engine now. `contract` is its last one, None if it never gave one; `down` says
    why it cannot be used, "" if it can."""

    name: str
    url: str
    control: str
    contract: Contract | None
    down: str
    weight: float = 1.0

    @property
    def produces(self) -> bool:
        return self.contract is not None and self.contract.produces

    @property
    def consumes(self) -> bool:
        return self.contract is not None and self.contract.consumes


@dataclass(frozen=True, slots=True)
class Plain:
    """One engine does all of it."""

    engine: Engine


@dataclass(frozen=True, slots=True)
class Pair:
    """Prefill here, decode there; both have a contract."""

    prefill: Engine
    decode: Engine
    agreement: Agreement


@dataclass(frozen=True, slots=True)
class Table:
    """All engines, and which of those that are up can hand over to which. Made once per change, not per
    request."""

    engines: tuple[Engine, ...]
    pairs: tuple[Pair, ...]
    refused: tuple[tuple[Engine, Engine, Refusal], ...]


def table(engines: Iterable[Engine]) -> Table:
    engines = tuple(engines)
    pairs: list[Pair] = []
    refused: list[tuple[Engine, Engine, Refusal]] = []
    for producer in engines:
        for consumer in engines:
            if producer is consumer or producer.down or consumer.down:
                continue
            if producer.contract is None or consumer.contract is None:
                continue
            if not (producer.produces and consumer.consumes):
                continue
            answer = negotiate(producer.contract, consumer.contract)
            if isinstance(answer, Refusal):
                refused.append((producer, consumer, answer))
            else:
                pairs.append(Pair(producer, consumer, answer))
    return Table(engines, tuple(pairs), tuple(refused))


@dataclass(frozen=True, slots=True)
class Shut:
    """Why an engine that is up gets no new request. `full` passes by itself and soon, so it is worth waiting for."""

    why: str
    full: bool = False


Pick = Callable[[Work, Sequence[Engine]], Engine]
"""Takes one of several engines, each of which could do this work."""


def choose(
    of: Table,
    *,
    handoff: bool,
    pick: Pick,
    shut: Mapping[str, Shut] = MappingProxyType({}),
    avoid: frozenset[str] = frozenset(),
) -> Plain | Pair:
    """The engine or pair that `pick` takes: first who prefills, then who decodes with what that one hands over.

    With `handoff` the request is split where the engines are meant for that (`splits`). Engines in `avoid` are taken
    only if there is no other, those in `shut` never. Raises Overloaded if only full ones are left; NoEngine, naming who
    is down or shut and why; or, if every pair refuses, the Refused that says in which field.
    """
    if handoff and splits(of.engines):
        return _pair(of, pick, shut, avoid)
    usable = [engine for engine in of.engines if not engine.down and (engine.consumes or len(of.engines) == 1)]
    if not usable:
        raise _none("decode", of.engines)
    open_ = _open(usable, [(engine.name,) for engine in usable], shut)
    return Plain(pick("decode", _preferred(open_, [(engine.name,) for engine in open_], avoid)))


def readers(of: Table, pair: Pair, shut: Mapping[str, Shut], avoid: frozenset[str]) -> list[Pair]:
    """The pairs whose decode engine could fetch what `pair.prefill` has staged for `pair.decode`: what travels, and who
    fetches which part, was settled when it was staged."""
    return [
        other
        for other in of.pairs
        if other.prefill == pair.prefill
        and other.decode.name not in avoid
        and other.decode.name not in shut
        and (other.agreement.takes, other.agreement.wire) == (pair.agreement.takes, pair.agreement.wire)
    ]


def splits(engines: Sequence[Engine]) -> bool:
    """Whether requests are to be handed over, or each served by one engine.

    An engine with role prefill is there to prefill for others, one with role decode to be prefilled for;
    engines that are all `both` serve each on its own. Being down does not change what an engine is for. One
    that was never seen may be the missing prefill engine, so without one that can do both it counts as such:
    better no answer than decode engines that silently do all the work.
    """
    if len(engines) < 2:
        return False
    roles = {engine.contract.role if engine.contract else "" for engine in engines}
    return "prefill" in roles or {"both", "decode"} <= roles or ("" in roles and "both" not in roles)


def _pair(of: Table, pick: Pick, shut: Mapping[str, Shut], avoid: frozenset[str]) -> Pair:
    if of.pairs:
        pairs = _open(of.pairs, [_names(pair) for pair in of.pairs], shut)
        pairs = _preferred(pairs, [_names(pair) for pair in pairs], avoid)
        producer = pick("prefill", list({pair.prefill.name: pair.prefill for pair in pairs}.values()))
        pairs = [pair for pair in pairs if pair.prefill is producer]
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
    return [e for e in engines if e.down and (e.contract.role if e.contract else "") in able]


def _none(work: Work, engines: Sequence[Engine]) -> NoEngine:
    if not engines:
        return NoEngine("no engine is configured", remedy="list the engines in deeplink.toml under [[engines]]")
    why = ", ".join(f"{engine.name} ({engine.down})" for engine in _down(engines, work))
    if not why:
        return NoEngine(f"no engine that can {work} is configured", remedy=f"start one with role {work} or both")
    return NoEngine(f"no engine that can {work} is up: {why}")


T = TypeVar("T")


def _names(pair: Pair) -> tuple[str, str]:
    return pair.prefill.name, pair.decode.name


def _open(options: Sequence[T], names: Sequence[tuple[str, ...]], shut: Mapping[str, Shut]) -> list[T]:
    """The options none of whose engines is shut; at least one."""
    found = [option for option, mine in zip(options, names, strict=True) if not shut.keys() & mine]
    if found:
        return found
    if any(all(shut[name].full for name in mine if name in shut) for mine in names):
        raise Overloaded("all engines that could take the request are full")
    shuts = sorted({name for mine in names for name in mine if name in shut})
    raise NoEngine("no engine takes requests now: " + ", ".join(f"{name} ({shut[name].why})" for name in shuts))


def _preferred(options: Sequence[T], names: Sequence[tuple[str, ...]], avoid: frozenset[str]) -> list[T]:
    """Those with the fewest engines to be avoided."""
    counts = [len(avoid.intersection(mine)) for mine in names]
    return [option for option, count in zip(options, counts, strict=True) if count == min(counts)]
