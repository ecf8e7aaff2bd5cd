"""An engine on several hosts as one object of Kubernetes: a LeaderWorkerSet, which starts a pod on each of them, tells
each its number and where the first is, and starts all of them again when one ends.
"""

from __future__ import annotations

from typing import Any

from deeplink.solver.emit.members import Member
from deeplink.solver.emit.nodes import FIRST, VERSION, Node

API = "leaderworkerset.x-k8s.io/v1"
KIND = "LeaderWorkerSet"
_LEADER = "$(LWS_LEADER_ADDRESS)"
_INDEX = "$(LWS_WORKER_INDEX)"
"""Kubernetes puts the values of these variables, which LeaderWorkerSet sets, into a container's arguments."""
NODES = (Node(FIRST, _LEADER), Node(_INDEX, _LEADER))
"""The leader and any worker."""
_ENGINE = "deeplink/engine"


def spec(member: Member, leader: dict[str, Any], worker: dict[str, Any]) -> dict[str, Any]:
    """`leader` and `worker` are the pods. Only the leader has the label by which the engine's Service finds it."""
    own = {"app.kubernetes.io/part-of": "deeplink", _ENGINE: member.label}
    return {
        "replicas": 1,
        "leaderWorkerTemplate": {
            "size": member.engine.hosts,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": {
                "metadata": {"labels": {"app.kubernetes.io/name": member.label, **own}},
                "spec": leader | _apart(member),
            },
            "workerTemplate": {
                "metadata": {"labels": {"app.kubernetes.io/name": f"{member.label}-worker", **own}},
                "spec": worker | _apart(member),
            },
        },
    }


def _apart(member: Member) -> dict[str, Any]:
    """No two of the engine's pods on one host, also where nothing is known that they could ask for."""
    term = {"labelSelector": {"matchLabels": {_ENGINE: member.label}}, "topologyKey": "kubernetes.io/hostname"}
    return {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}}


def comments(members: tuple[Member, ...]) -> list[str]:
    several = [member for member in members if member.engine.hosts > 1]
    if not several:
        return []
    found = [
        "Engines on several hosts are LeaderWorkerSets, whose controller has to be there. What their pods tell each",
        "other is neither encrypted nor authenticated: see that nothing else reaches it (a NetworkPolicy).",
    ]
    own = sorted({member.engine.image for member in several if member.engine.image})
    return found + [
        f"{image} has to have vLLM {VERSION}: with another an engine on several hosts refuses to start" for image in own
    ]
