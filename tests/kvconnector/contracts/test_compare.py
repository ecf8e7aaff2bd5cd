"""What of two contracts differs, and that what is marked as deciding is exactly what negotiation refuses."""

from __future__ import annotations

import msgspec
import pytest
from loopback import HND, VEC
from refused import DECODE, PREFILL, REFUSED

from deeplink.errors import Refused
from deeplink.kvconnector.contracts import compare as module
from deeplink.kvconnector.contracts.compare import Difference, compare, differences, fields
from deeplink.kvconnector.contracts.contract import CacheGroup, Contract, Model, Rank, Scales
from deeplink.kvconnector.contracts.negotiate import Agreement, Refusal, negotiate

replace = msgspec.structs.replace

HARMLESS = {"role", "epoch", "groups[0].block_size", "groups[0].layout", "ranks[0].channel", "ranks[0].transports"}


def test_two_unlike_engines_that_agree() -> None:
    found = compare(PREFILL, replace(DECODE, engine="other", engine_version="1", chip="gpu", casts=("a", "b")))
    assert found.agreed
    assert found.forth == Agreement(exact=True, transport="tcp", wire=("float32",))
    assert found.back is None
    assert {one.field for one in found.differences} == HARMLESS | {"engine", "engine_version", "chip", "casts"}
    assert not any(one.decides for one in found.differences)
    assert Difference("groups[0].layout", VEC, HND, False) in found.differences
    assert Difference("ranks[0].transports", "tcp 127.0.0.1:2", "tcp 127.0.0.1:4", False) in found.differences
    assert found.differences[0].field == "engine"
    assert found.differences[-1] == Difference("casts", "", "a, b", False)


def test_the_other_way_round() -> None:
    found = compare(DECODE, PREFILL)
    assert (found.forth, found.back) == (None, Agreement(exact=True, transport="tcp", wire=("float32",)))
    assert found.agreed


def test_both_ways() -> None:
    found = compare(replace(PREFILL, role="both"), replace(DECODE, role="both"))
    assert isinstance(found.forth, Agreement)
    assert isinstance(found.back, Agreement)


def test_one_way_if_the_roles_allow_one() -> None:
    assert compare(replace(PREFILL, role="both"), DECODE).back is None
    assert compare(PREFILL, replace(DECODE, role="both")).back is None
    assert compare(DECODE, replace(PREFILL, role="both")).forth is None


@pytest.mark.parametrize("role", ["prefill", "decode", "neither"])
def test_no_way(role: str) -> None:
    found = compare(replace(PREFILL, role=role), replace(DECODE, role=role))
    assert not found.agreed
    assert isinstance(found.forth, Refusal)
    assert found.forth.field == "role"
    assert found.back is None


def test_an_engine_with_itself() -> None:
    both = replace(PREFILL, role="both")
    found = compare(both, both)
    assert found.differences == ()
    assert not found.agreed
    assert isinstance(found.forth, Refusal)
    assert found.forth.field == "epoch"


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_refused_decides(field: str) -> None:
    consumer, ours, theirs = REFUSED[field]
    found = compare(PREFILL, consumer)
    assert not found.agreed
    assert isinstance(found.forth, Refusal)
    assert found.forth.field == field
    assert Difference(field, ours, theirs, True) in found.differences
    for one in found.differences:
        assert one.decides == (one.field == field or one.field not in HARMLESS), one


def test_what_only_one_has_decides_with_its_number() -> None:
    found = differences(PREFILL, REFUSED["groups"][0])
    extra = [one for one in found if one.field.startswith("groups[1].")]
    assert [one.field.partition(".")[2] for one in extra] == list(CacheGroup.__struct_fields__)
    assert all(one.decides and one.ours == "" and one.theirs for one in extra)


def change(contract: Contract, field: str) -> Contract:
    """The same contract with another value in one field."""
    where, _, name = field.rpartition(".")
    if where == "model":
        return replace(contract, model=other(contract.model, name))
    if where == "groups[0]":
        return replace(contract, groups=(other(contract.groups[0], name),))
    if where == "ranks[0]":
        return replace(contract, ranks=(other(contract.ranks[0], name),))
    return other(contract, name)


def other(struct: msgspec.Struct, name: str) -> msgspec.Struct:
    values = {
        "layout": HND,
        "block_size": 16,
        "dtype": "float16",
        "layers": 7 if isinstance(struct, Model) else (0, 4) if isinstance(struct, Rank) else (0, 2),
        "heads": ((0, 3),) if isinstance(struct, Rank) else 4,
        "scales": Scales("tensor", (1.0,) * 6),
        "role": "both",
        "transports": {"rdma": "", "tcp": ""},
        "casts": ("x",),
    }
    before = getattr(struct, name)
    after = values.get(name, before + 1 if isinstance(before, int) else f"{before}x")
    assert after != before
    return replace(struct, **{name: after})


@pytest.mark.parametrize("field", [name for name in fields(PREFILL) if name not in ("groups", "ranks", "transports")])
def test_a_field_decides_if_it_alone_is_refused(field: str) -> None:
    first = replace(PREFILL, role="both")
    second = replace(first, epoch="another")
    if field == "role":
        first = replace(first, role="prefill")
    changed = second if field == "role" else change(second, field)
    (found,) = [one for one in differences(first, changed) if one.field == field]
    refusal = negotiate(first, changed)
    assert found.decides == isinstance(refusal, Refusal)
    if isinstance(refusal, Refusal):
        assert refusal.field == ("ranks" if field.startswith("ranks[") else field)
        assert isinstance(refusal.error("a", "b"), Refused)


def test_every_field_of_a_contract_is_compared() -> None:
    names = set(fields(PREFILL))
    top = {name.partition(".")[0].partition("[")[0] for name in names}
    assert top == {*Contract.__struct_fields__, "transports"}
    for where, kind in (("model", Model), ("groups[0]", CacheGroup), ("ranks[0]", Rank)):
        assert {f"{where}.{name}" for name in kind.__struct_fields__} <= names


def test_it_is_pure() -> None:
    before = msgspec.json.encode((PREFILL, DECODE))
    assert module.compare(PREFILL, DECODE) == module.compare(PREFILL, DECODE)
    assert msgspec.json.encode((PREFILL, DECODE)) == before
