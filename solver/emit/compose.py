"""One machine, in containers: a Compose file."""

from __future__ import annotations

import re
from typing import Any

from deeplink.solver.emit import configs, images
from deeplink.solver.emit.commands import command
from deeplink.solver.emit.local import ROUTER_PORT, alike
from deeplink.solver.emit.members import Member
from deeplink.solver.emit.yaml_file import text
from deeplink.solver.placement import Placement

_PORT = 8000
_CONFIG = "/etc/deeplink.toml"
_SECRET = "/run/secrets/deeplink"
_MODELS = "/models"
"""Of the container: what its engine downloads is kept in a volume there, whoever the image's user is."""
_NUMBER = r"\d+"


def files(placement: Placement, members: tuple[Member, ...]) -> dict[str, str]:
    """compose.yaml, the configuration of each service, and Dockerfiles."""
    found = {f"{member.label}.toml": configs.engine(member, host=member.label, secret=_SECRET) for member in members}
    urls = {member.name: f"http://{member.label}:{_PORT}" for member in members}
    found["router.toml"] = configs.router(placement, members, urls, host="0.0.0.0", port=ROUTER_PORT, secret=_SECRET)
    services = {member.label: _service(placement, member) for member in members}
    document = {
        "name": "deeplink",
        "services": {"router": _router(), **services},
        "volumes": {"models": None},
        "secrets": {"deeplink": {"file": "./secret"}},
    }
    comments = [
        f"{placement.name}: {placement.model}. The secret engines and router share is made once, with:",
        "  (umask 077; openssl rand -hex 32 > secret)",
        *alike(members),
        *images.unknown(members),
        *_unknown(members),
    ]
    found["compose.yaml"] = text([document], comments)
    return found | images.files(members)


def _router() -> dict[str, Any]:
    return {
        "image": images.ROUTER,
        "build": {"context": ".", "dockerfile": "Dockerfile.router"},
        "command": ["router", "--config", _CONFIG],
        "ports": [f"127.0.0.1:{ROUTER_PORT}:{ROUTER_PORT}"],
        "volumes": [f"./router.toml:{_CONFIG}:ro"],
        "secrets": ["deeplink"],
        "restart": "unless-stopped",
    }


def _service(placement: Placement, member: Member) -> dict[str, Any]:
    shared = _shares_devices(member)
    started = command(placement, member, host="0.0.0.0", port=_PORT, config=_CONFIG, pinned=shared)
    service: dict[str, Any] = {"image": images.image(member)}
    if not member.engine.image:
        service["build"] = {"context": ".", "dockerfile": images.dockerfile(member)}
    service["entrypoint"] = list(started.words)
    variables = dict(started.variables)
    checkpoint = placement.checkpoint
    if checkpoint.startswith("/"):
        models = f"{checkpoint}:{checkpoint}:ro"
    else:
        models, variables["HF_HOME"] = f"models:{_MODELS}", _MODELS
    if variables:
        service["environment"] = variables
    service["volumes"] = [f"./{member.label}.toml:{_CONFIG}:ro", models]
    service["secrets"] = ["deeplink"]
    # What the chips of a group tell each other on the host goes through shared memory.
    service["shm_size"] = "16gb" if member.engine.tp > 1 else "1gb"
    service["restart"] = "unless-stopped"
    return service | _devices(member)


def _devices(member: Member) -> dict[str, Any]:
    vendor = member.profile.vendor if member.profile else None
    if vendor is None:
        return {}
    numbers = [str(number) for number in member.chips]
    if vendor.name == "NVIDIA":
        reserved = {"driver": "nvidia", "device_ids": numbers, "capabilities": ["gpu"]}
        return {"deploy": {"resources": {"reservations": {"devices": [reserved]}}}}
    if vendor.drm:
        nodes = [*vendor.control, "/dev/dri"]
    else:
        nodes = [*vendor.control, *(_node(vendor.nodes, number) for number in numbers)]
    return {"devices": [f"{node}:{node}" for node in nodes]}


def _shares_devices(member: Member) -> bool:
    """Whether its container gets all devices of the host, so that it has to be told which are its own."""
    return member.profile is not None and member.profile.vendor is not None and member.profile.vendor.drm


def _node(pattern: str, number: str) -> str:
    """The device node of one chip, from the expression that all of them match."""
    return re.sub(r"\\(.)\?", "", pattern.replace(_NUMBER, number))


def _unknown(members: tuple[Member, ...]) -> list[str]:
    found = []
    for member in {one.chip_label: one for one in members if not one.processor}.values():
        if member.profile is None:
            found.append(f"{member.engine.chip}: no profile, so its devices are not passed to the containers")
        elif member.profile.vendor is not None and member.profile.vendor.name != "NVIDIA":
            found.append(
                f"{member.engine.chip}: the device nodes are those it is known by; its vendor's container runtime may "
                "need others, or mounts"
            )
            if _shares_devices(member) and not member.visible:
                found.append(f"{member.engine.chip}: which variable gives a process its chips is not known")
    return found
