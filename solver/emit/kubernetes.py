"""A cluster, as manifests: a Deployment and a Service for each engine, for each has a contract, a cache and a load of
its own that the router has to know it by; and for the router. An engine on several hosts is a LeaderWorkerSet.
"""

from __future__ import annotations

from typing import Any

from deeplink.config import CONTROL_OFFSET
from deeplink.solver.emit import configs, images, leaderworkerset, nodes
from deeplink.solver.emit.commands import command
from deeplink.solver.emit.local import ROUTER_PORT
from deeplink.solver.emit.members import Member
from deeplink.solver.emit.nodes import Node
from deeplink.solver.emit.yaml_file import text
from deeplink.solver.placement import Placement

CHIP_LABEL = "deeplink/chip"
"""Of the nodes: the kind of their chips."""
_PORT = 8000
_CONFIGS = "/etc/deeplink"
_WRITTEN = "/run/deeplink"
"""Of the container: its configuration with the pod's own address in it."""
_SECRET = "/run/secrets/deeplink/secret"
_HOST = "POD_IP"
"""Peers reach an engine at its pod's address, which is known when the pod runs."""


def files(placement: Placement, members: tuple[Member, ...]) -> dict[str, str]:
    """placement.yaml, to be applied, and Dockerfiles."""
    urls = {member.name: f"http://{member.label}:{_PORT}" for member in members}
    configured = {f"{member.label}.toml": configs.engine(member, host=_HOST, secret=_SECRET) for member in members}
    configured["router.toml"] = configs.router(
        placement, members, urls, host="0.0.0.0", port=ROUTER_PORT, secret=_SECRET
    )
    manifests = [_object("v1", "ConfigMap", "deeplink", data=configured)]
    for member in members:
        ports = {"api": _PORT, "control": _PORT + CONTROL_OFFSET}
        manifests += [_started(placement, member), _service(member.label, ports)]
    manifests += [_deployment("deeplink-router", _router()), _service("deeplink-router", {"api": ROUTER_PORT})]
    kinds = sorted({member.chip_label for member in members})
    comments = [
        f"{placement.name}: {placement.model}. Once, the secret that engines and router share:",
        "  kubectl create secret generic deeplink --from-literal=secret=$(openssl rand -hex 32)",
        f"and on every node the kind of its chips, {' or '.join(kinds)}: kubectl label node NODE {CHIP_LABEL}=KIND",
        "Images without a registry are to be built from the Dockerfiles here, and put where nodes find them.",
        *leaderworkerset.comments(members),
        *images.unknown(members),
        *_unknown(members),
    ]
    return {"placement.yaml": text(manifests, comments), **images.files(members)}


_HEALTH = {"httpGet": {"path": "/health", "port": "api"}}
_SERVING: dict[str, Any] = {
    "ports": [{"name": "api", "containerPort": _PORT}, {"name": "control", "containerPort": _PORT + CONTROL_OFFSET}],
    # Half an hour to load the model.
    "startupProbe": {**_HEALTH, "periodSeconds": 10, "failureThreshold": 180},
    "readinessProbe": {**_HEALTH, "periodSeconds": 5, "timeoutSeconds": 5},
}
"""What a container with an API has."""


def _object(version: str, kind: str, name: str, **parts: Any) -> dict[str, Any]:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "labels": {"app.kubernetes.io/part-of": "deeplink"}},
        **parts,
    }


def _started(placement: Placement, member: Member) -> dict[str, Any]:
    if member.engine.hosts == 1:
        return _deployment(member.label, _engine(placement, member))
    nodes.require_known_version(member)
    pods = (_engine(placement, member, node) for node in leaderworkerset.NODES)
    spec = leaderworkerset.spec(member, *pods)
    return _object(leaderworkerset.API, leaderworkerset.KIND, member.label, spec=spec)


def _deployment(name: str, pod: dict[str, Any]) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": name}
    metadata = {"labels": {**labels, "app.kubernetes.io/part-of": "deeplink"}}
    spec = {
        "replicas": 1,
        # The chips of the old pod are the new one's.
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": labels},
        "template": {"metadata": metadata, "spec": pod},
    }
    return _object("apps/v1", "Deployment", name, spec=spec)


def _service(name: str, ports: dict[str, int]) -> dict[str, Any]:
    listed = [{"name": port, "port": number, "targetPort": number} for port, number in ports.items()]
    # Also while it is not ready: the router finds out itself, and its control endpoint is there before.
    spec = {"selector": {"app.kubernetes.io/name": name}, "ports": listed, "publishNotReadyAddresses": True}
    return _object("v1", "Service", name, spec=spec)


def _engine(placement: Placement, member: Member, node: Node | None = None) -> dict[str, Any]:
    """The pod of an engine, or of one of its hosts."""
    written = f"{_WRITTEN}/deeplink.toml"
    started = command(placement, member, host="0.0.0.0", port=_PORT, config=written, pinned=False, node=node)
    own = f"{_CONFIGS}/{member.label}.toml"
    script = f'sed "s/{_HOST}/$POD_IP/" {own} > {_WRITTEN}/deeplink.toml && exec "$@"'
    devices = {member.resource: str(_chips(member))} if member.resource else {}
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    container: dict[str, Any] = {
        "name": "engine",
        "image": images.image(member),
        "command": ["/bin/sh", "-c", script, "engine"],
        "args": list(started.words),
        "env": [
            address,
            # Where its other hosts reach this one, which vLLM would guess.
            *([address | {"name": "VLLM_HOST_IP"}] if node else []),
            *({"name": name, "value": value} for name, value in started.variables),
        ],
        **(_SERVING if node is None or node.rank == nodes.FIRST else {}),
        "volumeMounts": [
            *_mounts(),
            {"name": "written", "mountPath": _WRITTEN},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if devices:
        container["resources"] = {"limits": devices, "requests": devices}
    volumes = [*_volumes(), {"name": "written", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if (checkpoint := placement.checkpoint).startswith("/"):
        container["volumeMounts"].append({"name": "model", "mountPath": checkpoint, "readOnly": True})
        volumes.append({"name": "model", "hostPath": {"path": checkpoint, "type": "Directory"}})
    return {
        "enableServiceLinks": False,
        "nodeSelector": {CHIP_LABEL: member.chip_label},
        "containers": [container],
        "volumes": volumes,
    }


def _router() -> dict[str, Any]:
    container = {
        "name": "router",
        "image": images.ROUTER,
        "args": ["router", "--config", f"{_CONFIGS}/router.toml"],
        "ports": [{"name": "api", "containerPort": ROUTER_PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "api"}, "periodSeconds": 5},
        "volumeMounts": _mounts(),
    }
    return {"enableServiceLinks": False, "containers": [container], "volumes": _volumes()}


def _mounts() -> list[dict[str, Any]]:
    return [
        {"name": "configs", "mountPath": _CONFIGS, "readOnly": True},
        {"name": "secret", "mountPath": "/run/secrets/deeplink", "readOnly": True},
    ]


def _volumes() -> list[dict[str, Any]]:
    return [
        {"name": "configs", "configMap": {"name": "deeplink"}},
        {"name": "secret", "secret": {"secretName": "deeplink", "defaultMode": 0o400}},
    ]


def _chips(member: Member) -> int:
    """Of each of its pods."""
    return member.engine.tp // member.engine.hosts


def _unknown(members: tuple[Member, ...]) -> list[str]:
    return [
        f"{member.engine.chip}: what its device plugin calls it is not known, so its pods ask for no device: add "
        f"resources.limits with {_chips(member)} of it"
        for member in {(one.chip_label, _chips(one)): one for one in members}.values()
        if not member.resource and not member.processor
    ]
