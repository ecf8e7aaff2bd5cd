"""Whether a pool's engines can be of the kind that the fleet file says, and which of their roles and sizes can not."""

from __future__ import annotations

from dataclasses import dataclass

from deeplink.chips.profile import Profile
from deeplink.solver import kinds
from deeplink.solver.estimates.model import Model
from deeplink.solver.exact.problem import Role
from deeplink.solver.fleets import spanning
from deeplink.solver.fleets.fleet import Inventory
from deeplink.solver.kinds import DTYPES, TITLES, Obstacle


@dataclass(frozen=True, slots=True)
class Objection:
    """What is wrong with a pool's section: the key, why, its value, and what to do."""

    key: str
    why: str
    value: str
    remedy: str


def objection(pool: Inventory, model: Model, profile: Profile | None) -> Objection | None:
    """The first thing that keeps the pool from having any engine of its kind; None where it can have some."""
    title = TITLES[pool.engine]
    # What vLLM runs on is for whoever names the chip to know: it is the engine where none is named.
    if pool.engine != kinds.DEFAULT and profile is not None and pool.engine not in (known := kinds.served(profile)):
        others = ", ".join(known) or "none that is known"
        why = f"{title} is not known to run on {profile.title}"
        return Objection("engine", why, pool.engine, f"one of: {others}")
    if pool.contract is not None and pool.contract.engine in kinds.KINDS and pool.contract.engine != pool.engine:
        return Objection(
            "contract",
            f"the contract is of another engine than the pool's ({pool.engine})",
            pool.contract.engine,
            f'the contract of one of its engines, or engine = "{pool.contract.engine}"',
        )
    if pool.engine != kinds.DEFAULT and pool.dtype not in DTYPES[pool.engine]:
        why = f"{title} keeps no cache of these elements"
        return Objection("kv_dtype", why, pool.dtype, f"one of {', '.join(DTYPES[pool.engine])}")
    for size in pool.tp:
        found = _too_large(pool, "both", size)
        if found is not None and found.field == "hosts":
            return Objection("tp", str(found), str(size), f"sizes up to {pool.per_host}, or another engine")
    obstacles = [obstacle(pool, model, role, size) for role in pool.roles for size in pool.tp]
    if obstacles and (first := obstacles[0]) is not None and None not in obstacles:
        return Objection("roles", str(first), ", ".join(pool.roles), "other roles or sizes, or another engine")
    return None


def obstacle(pool: Inventory, model: Model, role: Role, size: int) -> Obstacle | None:
    """What keeps an engine of the pool from having this role on so many chips."""
    if role != "both":
        found = kinds.cannot_hand_over(
            pool.engine, dtype=pool.dtype, latent=model.replicated, window=model.window, processor=pool.processor
        )
        if found is not None:
            return found
    return _too_large(pool, role, size)


def _too_large(pool: Inventory, role: Role, size: int) -> Obstacle | None:
    hosts = spanning.hosts(pool, size)
    return kinds.too_large(pool.engine, size, hands_over=role != "both", hosts=hosts, processor=pool.processor)


def impossible(pool: Inventory, model: Model) -> list[str]:
    """What of the pool is not planned, with why: roles and sizes with the same obstacle together."""
    found: dict[Obstacle, dict[Role, list[int]]] = {}
    for role in pool.roles:
        for size in pool.tp:
            if (one := obstacle(pool, model, role, size)) is not None:
                found.setdefault(one, {}).setdefault(role, []).append(size)
    return [
        f"{pool.name}: no engines that {_does(role)} on {', '.join(map(str, sizes))} chips: {one}"
        for one, roles in found.items()
        for role, sizes in roles.items()
    ]


def _does(role: Role) -> str:
    return "prefill and decode" if role == "both" else role
