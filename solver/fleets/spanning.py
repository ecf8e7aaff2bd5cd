"""Groups of chips and the hosts they are on: a part of one host, or all of several.

How fast a group of several hosts is depends on the network between them and on what the engine makes of it. No roofline
here knows that, so such a group is a candidate only in roles whose times were measured with groups of that size.
"""

from __future__ import annotations

from deeplink.solver.estimates.rates import Phase, Rates
from deeplink.solver.exact.problem import Role
from deeplink.solver.fleets.fleet import Inventory

_PHASES: dict[Role, frozenset[Phase]] = {
    "prefill": frozenset({"prefill"}),
    "decode": frozenset({"decode"}),
    "both": frozenset({"prefill", "decode"}),
}


def hosts(pool: Inventory, size: int) -> int:
    """How many hosts a group of `size` chips is on."""
    return max(size // pool.per_host, 1)


def usable(pool: Inventory, size: int) -> int:
    """How many of the pool's chips can be in groups of this size: parts of hosts, or whole ones. Exact where each size
    divides the next."""
    whole, rest = divmod(pool.count, pool.per_host)
    return (whole * pool.per_host) // size * size + rest // size * size


def roles(pool: Inventory, size: int, rates: Rates) -> tuple[Role, ...]:
    """The pool's roles that a group of this size can be planned in."""
    if hosts(pool, size) == 1:
        return pool.roles
    return tuple(role for role in pool.roles if _PHASES[role] <= rates.measured)
