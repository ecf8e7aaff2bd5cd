"""One machine, as a shell script. Each pool's chips are counted from 0, so a pool is the chips of one kind there."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from deeplink.solver.emit import configs
from deeplink.solver.emit.commands import Command, command
from deeplink.solver.emit.members import Member
from deeplink.solver.kinds import Kind
from deeplink.solver.placement import Placement

HOST = "127.0.0.1"
FIRST_PORT = 8100
ROUTER_PORT = 8000
PYTHON = "python3"
PYTHONS: Mapping[Kind, str] = {"sglang": "SGLANG_PYTHON", "lmdeploy": "LMDEPLOY_PYTHON"}
"""Of kinds that are started as a module: the variable that says by which Python, as no two have the same packages."""


def files(placement: Placement, members: tuple[Member, ...]) -> dict[str, str]:
    """deeplink.toml, a file for each engine, and engines.sh, which starts every engine and waits for them."""
    found = {f"{member.label}.toml": configs.engine(member, host=HOST) for member in members}
    urls = {member.name: f"http://{HOST}:{FIRST_PORT + index}" for index, member in enumerate(members)}
    found["deeplink.toml"] = configs.router(placement, members, urls, port=ROUTER_PORT)
    script = [
        "#!/bin/sh",
        "# Starts the engines of the placement; the router is started with: deeplink router --config deeplink.toml",
        *(f"# {variable} is the Python that has that engine and deeplink" for variable in pythons(members)),
        *(f"# {line}" for line in unknown(members)),
        "set -eu",
        'cd "$(dirname "$0")"',
        *(f"{variable}=${{{variable}:-{PYTHON}}}" for variable in pythons(members)),
        "trap 'kill 0' INT TERM",
    ]
    for index, member in enumerate(members):
        started = command(placement, member, host=HOST, port=FIRST_PORT + index, config=f"{member.label}.toml")
        script.append(f"{_line(started, member)} > {shlex.quote(member.label + '.log')} 2>&1 &")
    found["engines.sh"] = "\n".join([*script, "wait"]) + "\n"
    return found


def pythons(members: tuple[Member, ...]) -> list[str]:
    """The variables that say where engines which are Python modules are installed."""
    return sorted({PYTHONS[member.engine.kind] for member in members if member.engine.kind in PYTHONS})


def _line(started: Command, member: Member) -> str:
    """The command as a shell takes it, with the Python of its kind."""
    variable = PYTHONS.get(member.engine.kind)
    return str(started) if variable is None else started.line(f'"${variable}"')


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
