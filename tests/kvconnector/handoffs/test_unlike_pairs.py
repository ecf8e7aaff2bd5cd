"""Every row of unlike_pairs: agreed exactly, refused by its field, or cast with consent and not without."""

from __future__ import annotations

import pytest
from loopback import NHD, make_contract, make_group
from unlike_pairs import OTHER_TYPES, SCALED_TYPES, SETTLED, Pair, dressed

from deeplink.kvconnector.contracts.contract import Contract
from deeplink.kvconnector.contracts.negotiate import Agreement, Refusal, negotiate

PREFILL = make_contract("p", "prefill", make_group(NHD, 64), channel="h:1", tcp="h:2")
DECODE = make_contract("d", "decode", make_group(NHD, 128), channel="h:3", tcp="h:4")


def sides(pair: Pair, *casts: str) -> tuple[Contract, Contract]:
    plain = {"casts": casts, **({"group.heads": 1, "rank.heads": ((0, 1),)} if pair.one_head else {})}
    return dressed(dressed(PREFILL, plain), pair.ours), dressed(dressed(DECODE, plain), pair.theirs)


def test_there_are_forty_unlike_pairs_and_more() -> None:
    rows = [pair for pair in [*SETTLED, *OTHER_TYPES, *SCALED_TYPES] if pair.refused or pair.cast]
    assert len(rows) >= 40
    assert len({pair.about for pair in rows}) == len(rows)


@pytest.mark.parametrize("pair", [*SETTLED, *OTHER_TYPES, *SCALED_TYPES], ids=lambda pair: pair.about)
def test_without_consent(pair: Pair) -> None:
    answer = negotiate(*sides(pair))
    if pair.refused:
        assert isinstance(answer, Refusal)
        assert answer.field == pair.refused
        assert answer.remedy
    else:
        assert isinstance(answer, Agreement)
        assert answer.exact


@pytest.mark.parametrize("pair", [*OTHER_TYPES, *SCALED_TYPES], ids=lambda pair: pair.about)
def test_with_consent_of_both_and_of_one(pair: Pair) -> None:
    answer = negotiate(*sides(pair, pair.cast))
    assert isinstance(answer, Agreement)
    assert answer.exact == pair.exact
    if pair.exact:
        return
    assert [cast.name for cast in answer.casts] == [pair.cast]
    ours, theirs = sides(pair, pair.cast)
    for one in ((ours, dressed(theirs, {"casts": ()})), (dressed(ours, {"casts": ()}), theirs)):
        refusal = negotiate(*one)
        assert isinstance(refusal, Refusal)
        assert refusal.field == pair.refused
        assert pair.cast in refusal.remedy
