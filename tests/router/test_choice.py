"""Which engine or pair serves a request."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from deeplink.errors import NoEngine, Refused
from deeplink.router.choice import Engine, Pair, Plain, choose, table

from .fake_engine import make_contract


def engine(name: str, role: str = "", down: str = "", **group: Any) -> Engine:
    contract = make_contract(role, **group) if role else None
    return Engine(name, f"http://{name}", f"http://{name}:1", contract, down)


def pick(*engines: Engine, handoff: bool = True, turn: int = 0, **more: Any) -> Plain | Pair:
    return choose(table(engines), handoff=handoff, load=more.pop("load", {}), turn=turn, **more)


def names(choice: Plain | Pair) -> tuple[str, ...]:
    return (choice.engine.name,) if isinstance(choice, Plain) else (choice.prefill.name, choice.decode.name)


def test_a_pair_that_agrees_is_taken() -> None:
    choice = pick(engine("d", "decode"), engine("p", "prefill"))
    assert isinstance(choice, Pair)
    assert names(choice) == ("p", "d")
    assert choice.agreement.exact


def test_pairs_take_turns() -> None:
    engines = [engine(name, "prefill" if name < "c" else "decode") for name in "abcd"]
    seen = Counter(names(pick(*engines, turn=turn)) for turn in range(8))
    assert set(seen.values()) == {2}
    assert len(seen) == 4


def test_fewest_open_requests_first() -> None:
    engines = [engine(name, "prefill" if name < "c" else "decode") for name in "abcd"]
    for turn in range(4):
        assert names(pick(*engines, turn=turn, load={"a": 2, "d": 1})) == ("b", "c")


def test_engines_to_avoid_are_taken_only_if_there_is_no_other() -> None:
    engines = [engine("a", "prefill"), engine("b", "prefill"), engine("d", "decode")]
    for turn in range(3):
        assert names(pick(*engines, turn=turn, avoid=frozenset({"a"}))) == ("b", "d")
    assert names(pick(*engines[1:], avoid=frozenset({"b"}))) == ("b", "d")


def test_pairs_that_refuse_are_never_taken() -> None:
    engines = [engine("p", "prefill"), engine("d", "decode", dtype="float16"), engine("e", "decode")]
    assert {names(pick(*engines, turn=turn)) for turn in range(4)} == {("p", "e")}


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
    seen = {names(pick(*engines, handoff=False, turn=turn)) for turn in range(4)}
    assert seen == {("d",), ("b",)}


def test_engines_that_do_both_serve_each_on_its_own() -> None:
    seen = {names(pick(engine("a", "both"), engine("b", "both"), turn=turn)) for turn in range(4)}
    assert seen == {("a",), ("b",)}
    assert names(pick(engine("a", "both"), engine("b", down="never seen"))) == ("a",)


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_a_lone_engine_serves_whatever_its_role(role: str) -> None:
    assert names(pick(engine("a", role))) == ("a",)


def test_without_engines() -> None:
    with pytest.raises(NoEngine, match="no engine is configured"):
        pick()
    with pytest.raises(NoEngine, match="gone"):
        pick(engine("a", "both", down="gone"))
