"""Which pools can hand over to which, and what it costs. Whether they can is for `negotiate` to say, as it is for the
engines and the router."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from deeplink.errors import LayoutError
from deeplink.kvconnector.contracts.contract import CacheGroup, Contract, Rank, Scales
from deeplink.kvconnector.contracts.contract import Model as Identity
from deeplink.kvconnector.contracts.negotiate import Refusal, negotiate
from deeplink.kvconnector.layouts.layout import ELEMENTS
from deeplink.solver.estimates.model import Model
from deeplink.solver.exact.problem import Link, Route
from deeplink.solver.fleets.fleet import Fleet, Inventory

_SCALED = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "int8")
_BLOCK = 128
"""Tokens. Any multiple of what the packed layouts need would do: engines need not agree on it."""


@dataclass(frozen=True, slots=True)
class Handoffs:
    """`refused` are pairs of pools with why they cannot hand over."""

    routes: tuple[Route, ...]
    links: tuple[Link, ...]
    refused: tuple[tuple[str, str, str], ...]


def handoffs(fleet: Fleet, smallest: dict[int, int]) -> Handoffs:
    """`smallest[p]` is the least number of chips of a decode engine in pool p; pools without are no target."""
    routes: list[Route] = []
    links: list[Link] = []
    refused: list[tuple[str, str, str]] = []
    connected = {(c.source, c.target): c for c in fleet.connections}
    sides: dict[tuple[int, bool], int] = {}
    for i, source in enumerate(fleet.pools):
        for j, target in enumerate(fleet.pools):
            if "prefill" not in source.roles or "decode" not in target.roles or j not in smallest:
                continue
            connection = connected.get((source.name, target.name))
            why = "no link is stated" if connection is None else refusal(source, target, fleet.model)
            if connection is None or why:
                refused.append((source.name, target.name, why))
                continue
            sent = [b.prompt * fleet.model.kv_bytes(source.dtype) for b in fleet.workload.buckets]
            seconds = tuple(size / connection.rate for size in sent)
            if connection.per == "link":
                links.append(Link(f"{source.name} -> {target.name}", connection.rate * fleet.link_share / 1e9))
                loads = [(len(links) - 1, tuple(size / 1e9 for size in sent))]
            else:
                loads = [(_side(links, sides, p, out, fleet), seconds) for p, out in ((i, True), (j, False))]
            parallel = smallest[j] if connection.per == "chip" else 1
            routes.append(Route(i, j, seconds, tuple(loads), connection.latency, parallel))
    return Handoffs(tuple(routes), tuple(links), tuple(refused))


def _side(links: list[Link], sides: dict[tuple[int, bool], int], pool: int, outwards: bool, fleet: Fleet) -> int:
    """All that leaves a pool's prefill chips, or arrives at its decode chips, shares these chips' own links: the load
    is the time that it takes up there."""
    if (pool, outwards) not in sides:
        name = f"{fleet.pools[pool].name}, {'out' if outwards else 'in'}"
        links.append(Link(name, fleet.link_share, pool, "prefill" if outwards else "decode"))
        sides[pool, outwards] = len(links) - 1
    return sides[pool, outwards]


def refusal(source: Inventory, target: Inventory, model: Model) -> str:
    """Why `source` cannot hand its cache to `target`; empty when it can. The engines' contracts decide where both are
    known, else contracts with what the fleet file says about their caches."""
    if source.contract is not None and target.contract is not None:
        ours, theirs = source.contract, target.contract
    else:
        ours, theirs = (_contract(pool, model) for pool in (source, target))
    ours = msgspec.structs.replace(ours, role="both", epoch="prefill")
    theirs = msgspec.structs.replace(theirs, role="both", epoch="decode")
    try:
        answer = negotiate(ours, theirs)
    except LayoutError as exc:
        return str(exc)
    if isinstance(answer, Refusal):
        return f"{answer.field}: {answer.ours} here, {answer.theirs} there; {answer.remedy}"
    return ""


def _contract(pool: Inventory, model: Model) -> Contract:
    if pool.dtype not in ELEMENTS:
        raise LayoutError(f"{pool.dtype} is not an element type")
    heads, head_dim = (1, model.kv_elements) if model.replicated else (model.kv_heads, model.head_dim)
    layout = "block token dim" if model.replicated and "head" in pool.layout else pool.layout
    # What an engine without calibrated scales uses.
    scales = Scales("tensor", (1.0,) * (2 * model.layers)) if pool.dtype in _SCALED else None
    layers = tuple(range(model.layers))
    group = CacheGroup("full", layers, heads, head_dim, pool.dtype, _BLOCK, layout, scales=scales)
    rank = Rank(0, 0, 0, ((0, heads),), (0, model.layers), "", {"tcp": ""})
    identity = Identity(model.name, model.layers, 1, "", "", "")
    return Contract(pool.engine, "", pool.chip.name, "both", pool.name, identity, (group,), (rank,), pool.casts)
