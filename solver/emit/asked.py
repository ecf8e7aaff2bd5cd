"""What the command of an engine of any kind is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deeplink.errors import SolverError
from deeplink.solver.emit.members import Member
from deeplink.solver.emit.nodes import Node
from deeplink.solver.kinds import TITLES

CONFIG = "DEEPLINK_CONFIG"
"""The variable that names deeplink.toml to engines without a flag for it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Where its API listens, the path of its deeplink.toml, and which of the engine's hosts this is, None for the only
    one."""

    host: str
    port: int
    config: str
    node: Node | None = None


def cache(member: Member, known: Mapping[str, str]) -> str:
    """What its kind calls the element type of its cache. Raises SolverError for one that it cannot keep."""
    engine = member.engine
    found = known.get(engine.kv_dtype)
    if found is None:
        raise SolverError(
            f"{TITLES[engine.kind]} keeps no cache of {engine.kv_dtype}",
            field="kv_dtype",
            ours=engine.kv_dtype,
            theirs=", ".join(known),
            remedy="choose another kv_dtype for the pool",
        )
    return found
