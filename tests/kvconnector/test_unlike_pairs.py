"""Every pair of `unlike_pairs` gets the answer that its row states: agreed, exact or not, or refused by that field."""

from __future__ import annotations

import msgspec
import pytest
from loopback import NHD, make_contract, make_group
from unlike_pairs import OTHER_TYPES, SCALED_TYPES, SETTLED, Pair, dressed

from deeplink.kvconnector.contract import CacheGroup, Contract, Scales
from deeplink.kvconnector.forms import SCHEMES, TENSOR
from deeplink.kvconnector.negotiate import Agreement, Refusal, negotiate

replace = msgspec.structs.replace
PREFILL = make_contract("p", "prefill", make_group(NHD, 16, "bfloat16"), channel="h:1", tcp="h:2")
DECODE = make_contract("d", "decode", make_group(NHD, 16, "bfloat16"), channel="h:3", tcp="h:4")


def scaled(group: CacheGroup) -> CacheGroup:
    """With the scales that its element type cannot do without."""
    scheme = SCHEMES.get(group.dtype)
    if scheme is None:
        return group
    if scheme == TENSOR:
        return replace(group, scales=Scales(TENSOR, (1.0,) * 2 * len(group.layers)))
    return replace(group, scales=Scales(scheme, layout="block token head kv dim"))


def sides(pair: Pair, *consents: str) -> tuple[Contract, Contract]:
    made = []
    for contract, changes in ((PREFILL, pair.ours), (DECODE, pair.theirs)):
        heads = {"group.heads": 1} if pair.one_head else {}
        contract = dressed(contract, {**heads, **changes, "casts": consents})
        groups = tuple(map(scaled, contract.groups))
        ranks = (replace(contract.ranks[0], heads=tuple((0, group.heads) for group in groups)),)
        made.append(replace(contract, groups=groups, ranks=ranks))
    return made[0], made[1]


def of(pairs: list[Pair]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", pairs, ids=[pair.about for pair in pairs])


def test_there_are_forty_unlike_pairs_and_more() -> None:
    rows = [pair for pair in [*SETTLED, *OTHER_TYPES, *SCALED_TYPES] if pair.refused or pair.cast]
    assert len(rows) >= 40
    assert len({pair.about for pair in rows}) == len(rows)


@of(SETTLED)
def test_settled(pair: Pair) -> None:
    answer = negotiate(*sides(pair))
    if pair.refused:
        assert isinstance(answer, Refusal), answer
        assert (answer.field, bool(answer.remedy)) == (pair.refused, True)
    else:
        assert isinstance(answer, Agreement), answer
        assert answer.exact


@of([*OTHER_TYPES, *SCALED_TYPES])
def test_other_types(pair: Pair) -> None:
    """A lossy cast is made with the consent of both, else refused by the dtype; an exact one needs none."""
    asked, told = negotiate(*sides(pair)), negotiate(*sides(pair, pair.cast))
    assert isinstance(told, Agreement), told
    assert told.exact is pair.exact
    assert [cast.name for cast in told.casts] == [pair.cast]
    if pair.exact:
        assert asked == told
    else:
        assert isinstance(asked, Refusal)
        assert asked.field == pair.refused
        assert pair.cast in asked.remedy
