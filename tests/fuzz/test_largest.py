"""Contracts as large as the limits allow, each in the way that costs most: still answered, and soon.

The router negotiates on its event loop, with whatever an engine states. The limit of each test is far above what it
takes; what it guards against is work that grows with the product of two counts.
"""

from __future__ import annotations

import msgspec
import pytest
from loopback import NHD, make_contract, make_group

from deeplink.kvconnector.contracts import contract
from deeplink.kvconnector.contracts.compare import compare
from deeplink.kvconnector.contracts.contract import Contract, Scales
from deeplink.kvconnector.contracts.negotiate import Agreement, Refusal, negotiate

pytestmark = pytest.mark.timeout(10)

replace = msgspec.structs.replace
PLAIN = make_contract("p", "both", make_group(NHD, 16), channel="h:1", tcp="h:2")
RANK, GROUP = PLAIN.ranks[0], PLAIN.groups[0]


def largest() -> dict[str, Contract]:
    layers = tuple(range(4096))
    return {
        "ranks": replace(PLAIN, ranks=tuple(replace(RANK, tp=tp) for tp in range(1024))),
        "replicas": replace(PLAIN, ranks=tuple(replace(RANK, dp=dp, layers=(0, 3 + dp)) for dp in range(1024))),
        "places": replace(
            PLAIN, ranks=tuple(replace(RANK, tp=tp, transports={"tcp": "", f"{tp}": ""}) for tp in range(512))
        ),
        "layers in many groups": replace(
            PLAIN,
            groups=tuple(replace(GROUP, layers=tuple(layer % 128 for layer in range(3900))) for _ in range(60)),
            ranks=(replace(RANK, heads=RANK.heads * 60),),
        ),
        "scales": replace(
            PLAIN,
            groups=(
                replace(
                    GROUP,
                    dtype="float8_e4m3fn",
                    layers=layers,
                    scales=Scales("tensor", tuple(1 + layer / 9999 for layer in range(8192))),
                ),
            ),
            ranks=(replace(RANK, layers=(0, 4096)),),
        ),
    }


@pytest.mark.parametrize("name", largest())
def test_the_largest_contracts_are_answered(name: str) -> None:
    ours = contract.decode(contract.encode(largest()[name]))
    theirs = replace(ours, epoch="q")
    assert isinstance(negotiate(ours, theirs), (Agreement, Refusal))
    assert compare(ours, replace(theirs, casts=("*->bfloat16",))).differences
