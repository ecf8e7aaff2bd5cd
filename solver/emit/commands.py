"""The command line of one engine, of whichever kind."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deeplink.solver.emit import lmdeploy, nodes, sglang, vllm
from deeplink.solver.emit.asked import CONFIG, Asked
from deeplink.solver.emit.members import Member
from deeplink.solver.emit.nodes import Node
from deeplink.solver.kinds import Kind
from deeplink.solver.placement import Placement

_WORDS: Mapping[Kind, Callable[[Placement, Member, Asked], list[str]]] = {
    "vllm": vllm.words,
    "sglang": sglang.words,
    "lmdeploy": lmdeploy.words,
}
_HAS_A_FLAG: frozenset[Kind] = frozenset({"vllm"})
"""For its deeplink.toml; others are told of it by a variable."""

_VARIABLES: Mapping[Kind, tuple[tuple[str, str], ...]] = {"sglang": sglang.VARIABLES}


@dataclass(frozen=True, slots=True)
class Command:
    """One engine's process: `variables` of its environment, and its words."""

    name: str
    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.line(shlex.quote(self.words[0]))

    def line(self, executable: str) -> str:
        """As a shell takes it, with its variables; `executable` stands where the first word would, as it is."""
        before = [f"{name}={shlex.quote(value)}" for name, value in self.variables]
        return " ".join([*before, executable, *(shlex.quote(word) for word in self.words[1:])])


def command(
    placement: Placement,
    member: Member,
    *,
    host: str,
    port: int,
    config: str,
    pinned: bool = True,
    node: Node | None = None,
) -> Command:
    """`config` is the path of its deeplink.toml. With `pinned` it is told which of its host's chips are its own; in a
    container it sees no others. `node` is which of the engine's hosts this is for; one host needs none. Raises
    SolverError for a cache that its kind cannot keep, and for an engine of several hosts where there is only one."""
    engine = member.engine
    if node is None:
        nodes.require_one_host(member)
    words = _WORDS[engine.kind](placement, member, Asked(host, port, config, node))
    variables = [(member.visible, ",".join(map(str, member.chips)))] if member.visible and pinned else []
    variables += [] if engine.kind in _HAS_A_FLAG else [(CONFIG, config)]
    variables += _VARIABLES.get(engine.kind, ())
    variables += sorted(engine.variables.items())
    return Command(member.name, (*words, *engine.flags), tuple(variables))
