"""A Ray cluster: what `deeplink.local.on_ray` starts there. Nodes say which kind of chip they have by a resource of
their own, so that unlike chips are told apart where Ray calls them alike."""

from __future__ import annotations

import json
from typing import Any

from deeplink.solver.emit import configs
from deeplink.solver.emit.commands import command
from deeplink.solver.emit.local import FIRST_PORT, PYTHON, PYTHONS, ROUTER_PORT
from deeplink.solver.emit.members import Member
from deeplink.solver.kinds import KINDS, TITLES
from deeplink.solver.placement import Placement

_GPU = {"NVIDIA", "AMD", "Intel", "MetaX"}
_NPU = "Huawei Ascend"
"""Vendors whose chips Ray hands out itself, as a GPU or an NPU."""
HOST = "NODE_IP"
SECRET = "SECRET_FILE"


def files(placement: Placement, members: tuple[Member, ...]) -> dict[str, str]:
    """ray.json, and start.sh, which runs it."""
    urls = {member.name: f"http://{HOST}:{FIRST_PORT + index}" for index, member in enumerate(members)}
    engines = []
    for index, member in enumerate(members):
        started = command(
            placement, member, host="0.0.0.0", port=FIRST_PORT + index, config="deeplink.toml", pinned=False
        )
        engines.append(
            {
                "name": member.name,
                "words": started.words,
                "variables": dict(started.variables),
                "port": FIRST_PORT + index,
                "config": configs.engine(member, host=HOST, secret=SECRET),
                **_asks(member),
            }
        )
    # Written when all addresses are known: one host stands for all of them until then.
    router = configs.router(placement, members, urls, port=ROUTER_PORT, secret=SECRET)
    document = {"version": 1, "name": placement.name, "router": router, "engines": engines}
    kinds = sorted({member.host_label for member in members})
    titles = [TITLES[kind] for kind in KINDS if any(member.engine.kind == kind for member in members)]
    modules = [TITLES[kind] for kind in PYTHONS if TITLES[kind] in titles]
    script = [
        "#!/bin/sh",
        "# Starts the placement's engines on the Ray cluster and the router here, until Ctrl-C. Every node has "
        f"{' or '.join(titles)}",
        "# and deeplink, and says how many chips of which kind it has:",
        *(f"""#   ray start --resources '{{"{_resource(kind)}": CHIPS}}' ...""" for kind in kinds),
        *([f"# {' and '.join(modules)} there by the {PYTHON} that Ray's processes find."] if modules else []),
        "# The secret that engines and router share is made once: (umask 077; openssl rand -hex 32 > secret)",
        *(f"# {line}" for line in _unknown(members)),
        "set -eu",
        'cd "$(dirname "$0")"',
        'exec python -m deeplink.local.on_ray ray.json --secret secret "$@"',
    ]
    return {"ray.json": json.dumps(document, indent=2) + "\n", "start.sh": "\n".join(script) + "\n"}


def _resource(kind: str) -> str:
    return f"deeplink-{kind}"


def _asks(member: Member) -> dict[str, Any]:
    """What an engine asks Ray for."""
    resources: dict[str, float] = {_resource(member.host_label): member.engine.tp}
    vendor = member.profile.vendor.name if member.profile and member.profile.vendor else ""
    if vendor == _NPU:
        resources["NPU"] = member.engine.tp
    return {"gpus": member.engine.tp if vendor in _GPU else 0, "resources": resources}


def _unknown(members: tuple[Member, ...]) -> list[str]:
    return [
        f"{member.engine.chip}: Ray does not hand out its devices; where a node has several engines each has to be "
        f"told which are its own{f', with {member.visible}' if member.visible else ''}"
        for member in {one.chip_label: one for one in members if not one.processor}.values()
        if not member.profile
        or not member.profile.vendor
        or (member.profile.vendor.name not in _GPU and member.profile.vendor.name != _NPU)
    ]
