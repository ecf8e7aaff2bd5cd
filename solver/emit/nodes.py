"""An engine whose chips are on several hosts: a process on each, of which the first serves and the others compute."""

from __future__ import annotations

from dataclasses import dataclass

from deeplink.errors import SolverError
from deeplink.solver.emit.members import Member
from deeplink.solver.kinds import DEFAULT

FIRST = "0"
VERSION = "0.32"
"""Of vLLM: the only one with which deeplink hands over from and to several hosts."""


@dataclass(frozen=True, slots=True)
class Node:
    """One of the engine's hosts: its number as text, which may be a variable of a manifest, and where the first of them
    is reached."""

    rank: str
    address: str


def flags(member: Member, node: Node) -> list[str]:
    """What vLLM is told on this host. Only the first has an API and a control endpoint."""
    words = ["--nnodes", str(member.engine.hosts), "--node-rank", node.rank, "--master-addr", node.address]
    return [*words, "--distributed-executor-backend", "mp", *([] if node.rank == FIRST else ["--headless"])]


def require_one_host(member: Member) -> None:
    """Raises SolverError for an engine that is on several."""
    if member.engine.hosts > 1:
        raise SolverError(
            f"{member.name} is one engine on {member.engine.hosts} hosts, which only Kubernetes manifests start",
            field="hosts",
            ours=str(member.engine.hosts),
            theirs="1",
            remedy="deeplink emit --format k8s, or solve without sizes above per_host",
        )


def require_known_version(member: Member) -> None:
    """Raises SolverError where neither the pool nor the chip's profile names an image that has the version: with
    another the engine refuses to start. What is in a pool's own image is for whoever names it to know. So it does for
    engines of other kinds, which were not tested on several hosts."""
    if member.engine.kind != DEFAULT:
        raise SolverError(
            f"{member.name} is one engine on {member.engine.hosts} hosts, on which {member.title} was not tested",
            field="hosts",
            ours=str(member.engine.hosts),
            theirs="1",
            remedy="solve without sizes above per_host",
        )
    known = member.served.image.value if member.served and member.served.image else ""
    if member.engine.image or f":v{VERSION}." in known:
        return
    raise SolverError(
        f"{member.name} is one engine on {member.engine.hosts} hosts, from and to which deeplink hands over with vLLM "
        f"{VERSION} only, and no image for {member.engine.chip} is known to have that",
        field="image",
        ours=known or "none",
        theirs=f"one with vLLM {VERSION}",
        remedy=f"name one as image of the pool {member.engine.pool}, or solve without sizes above per_host",
    )
