"""One machine, as a shell script. Each pool's chips are counted from 0, so a pool is the chips of one kind there."""

from __future__ import annotations

import shlex

from deeplink.solver.emit import configs
from deeplink.solver.emit.commands import command
from deeplink.solver.emit.members import Member
from deeplink.solver.placement import Placement

HOST = "127.0.0.1"
FIRST_PORT = 8100
ROUTER_PORT = 8000


def files(placement: Placement, members: tuple[Member, ...]) -> dict[str, str]:
    """deeplink.toml, a file for each engine, and engines.sh, which starts every engine and waits for them."""
    found = {f"{member.label}.toml": configs.engine(member, host=HOST) for member in members}
    urls = {member.name: f"http://{HOST}:{FIRST_PORT + index}" for index, member in enumerate(members)}
    found["deeplink.toml"] = configs.router(placement, members, urls, port=ROUTER_PORT)
    script = [
        "#!/bin/sh",
        "# Starts the engines of the placement; the router is started with: deeplink router --config deeplink.toml",
        *(f"# {line}" for line in unknown(members)),
        "set -eu",
        'cd "$(dirname "$0")"',
        "trap 'kill 0' INT TERM",
    ]
    for index, member in enumerate(members):
        line = command(placement, member, host=HOST, port=FIRST_PORT + index, config=f"{member.label}.toml")
        script.append(f"{line} > {shlex.quote(member.label + '.log')} 2>&1 &")
    found["engines.sh"] = "\n".join([*script, "wait"]) + "\n"
    return found


def unknown(members: tuple[Member, ...]) -> list[str]:
    found = alike(members)
    for member in members:
        if not member.visible and not member.processor:
            found.append(
                f"{member.engine.chip}: the variable that gives a process its chips is not known; {member.name} "
                f"is planned on chips {member.chips.start} to {member.chips.stop - 1} of the pool {member.engine.pool}"
            )
    return found


def alike(members: tuple[Member, ...]) -> list[str]:
    """Pools of one vendor on one machine are counted as one by that vendor's tools."""
    pools: dict[str, list[str]] = {}
    for member in members:
        vendor = member.profile.vendor.name if member.profile and member.profile.vendor else ""
        if vendor and member.engine.pool not in pools.setdefault(vendor, []):
            pools[vendor].append(member.engine.pool)
    return [
        f"The chips of {' and '.join(names)} are {vendor}'s, and those of each are counted from 0: if they are on one "
        "machine, put in their real numbers"
        for vendor, names in pools.items()
        if len(names) > 1
    ]
