"""Two contracts side by side: may either hand over to the other, and which of their differences matters. Pure.

It is `negotiate` for people: an operator wants to know of everything that differs, and that most of it does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from deeplink.kvconnector.contracts.contract import Contract
from deeplink.kvconnector.contracts.negotiate import Agreement, Refusal, negotiate, refusals, sizes

_HELD = (".heads", ".layers")


@dataclass(frozen=True, slots=True)
class Difference:
    """A field with another value in each contract; "" where one has none. `decides`: a handoff is refused over it."""

    field: str
    ours: str
    theirs: str
    decides: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """`forth` is the answer for ours as the producer, `back` for theirs; None where the roles rule it out.

    When they rule out both, `forth` is the refusal that says so.
    """

    forth: Agreement | Refusal | None
    back: Agreement | Refusal | None
    differences: tuple[Difference, ...]

    @property
    def agreed(self) -> bool:
        return not any(isinstance(answer, Refusal) for answer in (self.forth, self.back))


def compare(ours: Contract, theirs: Contract) -> Comparison:
    back = negotiate(theirs, ours) if theirs.produces and ours.consumes else None
    possible = ours.produces and theirs.consumes
    forth = negotiate(ours, theirs) if possible or back is None else None
    return Comparison(forth, back, differences(ours, theirs))


def differences(ours: Contract, theirs: Contract) -> tuple[Difference, ...]:
    """Every field that differs, in the contract's order, named as in a Refusal.

    What decides is what negotiation refuses, taken from it rather than listed again here. Roles say which way a handoff
    may go, so no difference in them is refused by itself.
    """
    refused = {refusal.field for refusal in refusals(ours, theirs)} - {"role"}
    first, second = fields(ours), fields(theirs)
    found = []
    for name in dict.fromkeys((*first, *second)):
        a, b = first.get(name, ""), second.get(name, "")
        if a != b:
            # What only one has of its groups or ranks is refused by their number.
            missing = name not in first or name not in second
            decides = name in refused or (missing and name.split("[")[0] in refused)
            # And where a rank lacks what another needs, what each has is why.
            decides = decides or ("ranks" in refused and name.startswith("ranks[") and name.endswith(_HELD))
            found.append(Difference(name, a, b, decides))
    return tuple(found)


def fields(contract: Contract) -> dict[str, str]:
    """Every field by its name, as text: ``model.weights``, ``groups[0].layout``, ``ranks[0].channel``, …

    `groups` and `ranks` are how many there are, `transports` the names that negotiation looks at.
    """
    found = {
        name: str(getattr(contract, name)) for name in ("engine", "engine_version", "chip", "role", "alone", "epoch")
    }
    found |= _flat("model", contract.model)
    found["groups"] = str(len(contract.groups))
    for index, group in enumerate(contract.groups):
        found |= _flat(f"groups[{index}]", group)
    found["ranks"] = sizes(contract)
    found["transports"] = ", ".join(contract.ranks[0].transports)
    for index, rank in enumerate(contract.ranks):
        found |= _flat(f"ranks[{index}]", rank)
    found["casts"] = ", ".join(contract.casts)
    return found


def _flat(where: str, struct: msgspec.Struct) -> dict[str, str]:
    return {f"{where}.{name}": _text(getattr(struct, name)) for name in struct.__struct_fields__}


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {address}" for name, address in value.items())
    return str(value)
