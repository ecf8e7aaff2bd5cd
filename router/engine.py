"""One engine as the router knows it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from deeplink.kvconnector.contracts.contract import Contract

DEEPLINK, PLAIN = "deeplink", "plain"
"""The kinds that need no plugin: engines with deeplink's control endpoint, and those of which nothing is known."""
ALONE = "alone"
"""The role of an engine that hands nothing over, although others of its kind do."""


@dataclass(frozen=True, slots=True)
class Said:
    """What an engine without a contract says of itself, in words of its kind.

    `role` is empty if it does not say. `alone`: it can serve a request from beginning to end. `settings` decide whether
    two engines understand each other's caches (`declared`); `facts` are for its kind only. `incarnation` differs
    between any two readings that an engine's restart may lie between.
    """

    role: str = ""
    alone: bool = True
    settings: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    facts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Engine:
    """What is known about one engine now. `contract` is its last one, None if it never gave one; `down` says why it
    cannot be used, "" if it can. Engines of other kinds than deeplink have no contract: `said` is what they say,
    `declared_role` and `settings` what their operator does. A plain one does all of a request itself. `rank` is which
    of the data-parallel ranks behind `url` this is; `bootstrap` where prefill engines of some kinds are looked up,
    `events` and `replay` where it publishes what becomes of its cache.
    """

    name: str
    url: str
    control: str
    contract: Contract | None
    down: str
    weight: float = 1.0
    kind: str = DEEPLINK
    declared_role: str = ""
    settings: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    bootstrap: str = ""
    rank: int | None = None
    said: Said | None = None
    events: str = ""
    replay: str = ""

    @property
    def plain(self) -> bool:
        return self.kind == PLAIN

    @property
    def foreign(self) -> bool:
        """Whether it hands over in the way of another kind than ours."""
        return self.kind not in (DEEPLINK, PLAIN)

    @property
    def role(self) -> str:
        """ "" as long as it is not known."""
        if self.plain:
            return "both"
        if self.foreign:
            return self.declared_role or (self.said.role if self.said else "")
        return self.contract.role if self.contract is not None else ""

    @property
    def produces(self) -> bool:
        if self.foreign:
            return self.role in ("prefill", "both")
        return self.contract is not None and self.contract.produces

    @property
    def consumes(self) -> bool:
        if self.foreign:
            return self.role in ("decode", "both")
        return self.plain or (self.contract is not None and self.contract.consumes)

    @property
    def alone(self) -> bool:
        """Whether it can serve a request that nobody prefills for it."""
        if self.foreign:
            return self.role == ALONE or (self.consumes and self.said is not None and self.said.alone)
        return self.consumes

    @property
    def whole(self) -> bool:
        """Whether it can generate from beginning to end. An engine that consumes may be one that cannot prefill."""
        return self.contract is None or self.contract.alone
