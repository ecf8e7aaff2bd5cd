"""What `adapter` reads of an engine and states, without LMDeploy: a cache of two heads, full of random bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from world import Shape

from deeplink.kvconnector.caches.group import Group
from deeplink.kvconnector.contracts.contract import CacheGroup, Contract, Model, Rank
from lmdeploy_deeplink.migration.adapter import Place

LAYOUT = "block (k: token head dim | v: token head dim)"
HEADS = 2
ALONE = Place()


@dataclass
class Fake:
    role: str
    block_size: int
    weights: str = "w"
    layers: int = 3

    def group(self, place: Place = ALONE) -> Group:
        spec = CacheGroup("full", tuple(range(self.layers)), HEADS, 32, "bfloat16", self.block_size, LAYOUT)
        heads = HEADS // place.size
        mine = (place.rank * heads, (place.rank + 1) * heads)
        rank = Rank(place.rank, 0, 0, (mine,), (0, self.layers), "", {})
        (group,) = Shape((spec,), blocks=24).hold(rank, 1 + place.rank + (10 if self.role == "decode" else 0))
        return group

    def model(self) -> Model:
        return Model("LlamaForCausalLM", self.layers, 100, "{}", "none", self.weights)


@dataclass
class FakeStated:
    role: str
    model: Model

    def contract(
        self, group: Group, place: Place, epoch: str, channel: str, transports: dict[str, str], casts: Any
    ) -> Contract:
        rank = Rank(place.rank, 0, 0, (group.heads,), (0, len(group.layers)), channel, transports)
        return Contract("lmdeploy", "0", "cpu", self.role, epoch, self.model, (group.spec,), (rank,), casts)
