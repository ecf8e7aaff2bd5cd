"""Which engine, or which pair of engines, serves a request. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from deeplink.errors import NoEngine
from deeplink.kvconnector.contract import Contract
from deeplink.kvconnector.negotiate import Agreement, Refusal, negotiate


@dataclass(frozen=True, slots=True)
class Engine:
    """What is known about one engine now. `contract` is its last one, None if it never gave one; `down` says
    why it cannot be used, "" if it can."""

    name: str
    url: str
    control: str
    contract: Contract | None
    down: str

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


def choose(
    of: Table,
    *,
    handoff: bool,
    load: Mapping[str, int],
    turn: int,
    avoid: frozenset[str] = frozenset(),
) -> Plain | Pair:
    """The engine or pair with the fewest open requests (`load`, by name); `turn` rotates among equals.

    With `handoff` the request is split where the engines are meant for that (`splits`). Engines in `avoid`
    are taken only if there is no other. Raises NoEngine, naming who is down and why; or, if every pair
    refuses, the Refused that says in which field.
    """
    if handoff and splits(of.engines):
        return _pair(of, load, turn, avoid)
    usable = [engine for engine in of.engines if not engine.down and (engine.consumes or len(of.engines) == 1)]
    if not usable:
        raise _none("decode", of.engines)
    return Plain(_least(usable, [(engine.name,) for engine in usable], load, turn, avoid))


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


def _pair(of: Table, load: Mapping[str, int], turn: int, avoid: frozenset[str]) -> Pair:
    if of.pairs:
        names = [(pair.prefill.name, pair.decode.name) for pair in of.pairs]
        return _least(of.pairs, names, load, turn, avoid)
    if of.refused:
        producer, consumer, refusal = of.refused[0]
        raise refusal.error(producer.name, consumer.name)
    up = [engine for engine in of.engines if not engine.down]
    producing, consuming = any(e.produces for e in up), any(e.consumes for e in up)
    # Both, and yet no pair: one engine that does both is up alone. What is missing is what the others do.
    alone = consuming and _down(of.engines, "prefill")
    raise _none("decode" if producing and not alone else "prefill", of.engines)


Work = Literal["prefill", "decode"]


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


def _least(
    options: Sequence[T],
    names: Sequence[tuple[str, ...]],
    load: Mapping[str, int],
    turn: int,
    avoid: frozenset[str],
) -> T:
    """The option whose engines have the least to do."""
    count = len(options)

    def cost(index: int) -> tuple[int, int, int]:
        mine = names[index]
        return len(avoid.intersection(mine)), sum(load.get(name, 0) for name in mine), (index - turn) % count

    return options[min(range(count), key=cost)]
