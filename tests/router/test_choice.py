"""Which engine or pair serves a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from deeplink.errors import NoEngine, Overloaded, Refused
from deeplink.kvconnector.contracts.negotiate import negotiate
from deeplink.router.choice import Pair, Pick, Plain, Shut, choose, readers, table
from deeplink.router.engine import Engine
from deeplink.router.policy import Work

from .fake_engine import make_contract


def engine(name: str, role: str = "", down: str = "", **group: Any) -> Engine:
    contract = make_contract(role, **group) if role else None
    return Engine(name, f"http://{name}", f"http://{name}:1", contract, down)


def first(work: Work, engines: Sequence[Engine]) -> Engine:
    return engines[0]


def pick(*engines: Engine, handoff: bool = True, pick: Pick = first, **more: Any) -> Plain | Pair:
    return choose(table(engines), handoff=handoff, pick=pick, **more)


def take(*wanted: str) -> Pick:
    """Takes an engine with one of these names; there has to be one."""
    return lambda work, engines: next(engine for engine in engines if engine.name in wanted)


def names(choice: Plain | Pair) -> tuple[str, ...]:
    return (choice.engine.name,) if isinstance(choice, Plain) else (choice.prefill.name, choice.decode.name)


def test_a_pair_that_agrees_is_taken() -> None:
    choice = pick(engine("d", "decode"), engine("p", "prefill"))
    assert isinstance(choice, Pair)
    assert names(choice) == ("p", "d")
    assert choice.agreement.exact


def test_engines_that_serve_nothing_alone_get_what_is_handed_over_and_what_generates_nothing() -> None:
    contract = msgspec.structs.replace(make_contract("decode"), alone=False)
    engines = engine("p", "prefill"), replace(engine("d", "decode"), contract=contract)
    assert names(pick(*engines, generates=True)) == ("p", "d")
    assert names(pick(*engines, handoff=False)) == ("d",)
    with pytest.raises(NoEngine, match="by itself"):
        pick(*engines, handoff=False, generates=True)
    assert names(pick(*engines, engine("e", "decode"), handoff=False, generates=True)) == ("e",)


def test_who_prefills_is_picked_first_then_who_decodes_for_it() -> None:
    asked: list[tuple[str, list[str]]] = []

    def last(work: Work, engines: Sequence[Engine]) -> Engine:
        asked.append((work, [engine.name for engine in engines]))
        return engines[-1]

    engines = [engine(name, "prefill") for name in "ab"] + [engine(name, "decode") for name in "cd"]
    assert names(pick(*engines, pick=last)) == ("b", "d")
    assert asked == [("prefill", ["a", "b"]), ("decode", ["c", "d"])]


def test_decode_is_picked_among_those_the_prefill_engine_agrees_with() -> None:
    engines = [engine("a", "prefill"), engine("b", "prefill", dtype="float16")]
    engines += [engine("c", "decode"), engine("d", "decode", dtype="float16")]
    assert names(pick(*engines, pick=take("b", "d"))) == ("b", "d")
    with pytest.raises(StopIteration):
        pick(*engines, pick=take("b", "c"))


def test_shut_engines_get_nothing() -> None:
    engines = [engine("p", "prefill"), engine("d", "decode"), engine("e", "decode")]
    assert names(pick(*engines, shut={"d": Shut("draining")})) == ("p", "e")
    assert names(pick(*engines, shut={"d": Shut("draining")}, handoff=False)) == ("e",)
    with pytest.raises(NoEngine, match=r"p \(draining\)"):
        pick(*engines, shut={"p": Shut("draining")})


def test_only_full_engines_are_worth_waiting_for() -> None:
    engines = [engine("p", "prefill"), engine("d", "decode"), engine("e", "decode")]
    full = Shut("full", full=True)
    with pytest.raises(Overloaded):
        pick(*engines, shut={"d": full, "e": Shut("draining")})
    with pytest.raises(Overloaded):
        pick(*engines, shut={"p": full})
    with pytest.raises(NoEngine):
        pick(*engines, shut={"p": Shut("draining"), "d": full, "e": full})


def test_doubted_engines_are_better_than_none() -> None:
    engines = [engine("p", "prefill"), engine("d", "decode"), engine("e", "decode")]
    doubted = Shut("it failed", doubted=True)
    assert names(pick(*engines, shut={"d": doubted})) == ("p", "e")
    assert names(pick(*engines, shut={"d": doubted, "e": doubted, "p": doubted})) == ("p", "d")
    assert names(pick(*engines, shut={"d": doubted, "e": Shut("draining")})) == ("p", "d")
    with pytest.raises(Overloaded):
        pick(*engines, shut={"p": Shut("full", full=True), "d": doubted, "e": doubted})


def test_two_contracts_are_negotiated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [engine(name, "prefill") for name in "ab"] + [engine(name, "decode") for name in "cd"]
    engines.append(engine("e", "decode", dtype="float16"))
    before = table(engines)
    asked: list[object] = []

    def ask(*contracts: object) -> object:
        asked.append(contracts)
        return negotiate(*contracts)  # type: ignore[arg-type]

    monkeypatch.setattr("deeplink.router.choice.negotiate", ask)
    assert table(engines, before) == before
    assert not asked
    engines[2] = engine("c", "decode")
    after = table(engines, before)
    assert len(asked) == 2
    assert after == table(engines)
    assert after.partners["a"][0].decode is engines[2]


def test_readers_of_what_is_staged() -> None:
    engines = [engine("p", "prefill"), engine("d", "decode"), engine("e", "decode"), engine("f", "decode")]
    of = table([*engines, engine("q", "prefill"), engine("g", "decode", dtype="float16")])
    pair = next(pair for pair in of.pairs if (pair.prefill.name, pair.decode.name) == ("p", "d"))
    others = readers(of, pair, {"f": Shut("draining")}, frozenset("d"))
    assert [(other.prefill.name, other.decode.name) for other in others] == [("p", "e")]


def test_engines_to_avoid_are_taken_only_if_there_is_no_other() -> None:
    engines = [engine("a", "prefill"), engine("b", "prefill"), engine("d", "decode")]
    assert names(pick(*engines, avoid=frozenset({"a"}))) == ("b", "d")
    assert names(pick(*engines[1:], avoid=frozenset({"b"}))) == ("b", "d")


def test_pairs_that_refuse_are_never_taken() -> None:
    engines = [engine("p", "prefill"), engine("d", "decode", dtype="float16"), engine("e", "decode")]
    assert names(pick(*engines)) == ("p", "e")


def test_if_all_pairs_refuse_the_error_names_the_field() -> None:
    with pytest.raises(Refused) as caught:
        pick(engine("p", "prefill"), engine("d", "decode", dtype="float16"))
    error = caught.value
    assert (error.field, error.ours, error.theirs) == ("groups[0].dtype", "bfloat16", "float16")
    assert error.remedy
    assert "p" in error.message
    assert "d" in error.message


@pytest.mark.parametrize(
    "engines",
    [
        [engine("d", "decode"), engine("p", "prefill", down="cannot connect")],
        [engine("d", "decode"), engine("p", down="cannot connect")],
        [engine("d", "decode"), engine("b", "both", down="cannot connect")],
        [engine("b", "both"), engine("p", "prefill", down="cannot connect")],
    ],
)
def test_prefill_engines_that_are_down_are_not_done_without(engines: list[Engine]) -> None:
    with pytest.raises(NoEngine, match=r"prefill.*cannot connect"):
        pick(*engines)


def test_no_decode_engine_up() -> None:
    with pytest.raises(NoEngine, match=r"decode.*d \(gone\)"):
        pick(engine("p", "prefill"), engine("d", "decode", down="gone"))


def test_what_cannot_be_handed_over_goes_to_an_engine_that_decodes() -> None:
    engines = [engine("p", "prefill"), engine("d", "decode"), engine("b", "both")]
    assert {names(pick(*engines, handoff=False, pick=take(name))) for name in "db"} == {("d",), ("b",)}


def test_engines_that_do_both_serve_each_on_its_own() -> None:
    seen = {names(pick(engine("a", "both"), engine("b", "both"), pick=take(name))) for name in "ab"}
    assert seen == {("a",), ("b",)}
    assert names(pick(engine("a", "both"), engine("b", down="never seen"))) == ("a",)


def test_plain_engines_hand_nothing_over() -> None:
    plain = replace(engine("x"), kind="plain")
    assert (plain.role, plain.consumes, plain.produces) == ("both", True, False)
    assert names(pick(plain, engine("p", "prefill"), engine("d", "decode"))) == ("p", "d")
    assert names(pick(plain, engine("p", "prefill"), engine("d", "decode"), handoff=False)) == ("x",)
    for other in (engine("d", "decode"), engine("b", "both"), engine("n", down="never seen")):
        assert names(pick(plain, other)) == ("x",)
    with pytest.raises(NoEngine, match=r"prefill is up: p \(gone\)$"):
        pick(replace(plain, down="gone"), engine("p", "prefill", down="gone"), engine("d", "decode"))


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_a_lone_engine_serves_whatever_its_role(role: str) -> None:
    assert names(pick(engine("a", role))) == ("a",)


def test_without_engines() -> None:
    with pytest.raises(NoEngine, match="no engine is configured"):
        pick()
    with pytest.raises(NoEngine, match="gone"):
        pick(engine("a", "both", down="gone"))
