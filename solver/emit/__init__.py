"""A placement as what starts it: engine commands, the router's configuration with weights, manifests.

    members     the single engines of a placement: names, chips, what is known of starting them
    commands    an engine's command line; asked  what it is told
    vllm, sglang, lmdeploy  in each kind's words
    nodes       what of it differs where an engine is on several hosts
    configs     deeplink.toml of the router and of the engines
    images      Dockerfiles that add deeplink to the engines' images
    local       one machine, as a shell script
    compose     one machine, in containers
    kubernetes  a cluster, as manifests
    leaderworkerset  of them, an engine on several hosts
    ray         a Ray cluster
    yaml_file   manifests as text

Each format is a pure function from a placement to files by name. What is not known of a chip (its image, its name in
Kubernetes, its device nodes) is left out, and a comment at the top of the file says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from deeplink.chips.profile import Profile
from deeplink.errors import SolverError
from deeplink.plugins import load_plugins
from deeplink.solver.emit import compose, kubernetes, local, ray
from deeplink.solver.emit.members import Member, members
from deeplink.solver.placement import Placement

Format = Callable[[Placement, tuple[Member, ...]], dict[str, str]]

FORMATS: Mapping[str, Format] = {
    "local": local.files,
    "compose": compose.files,
    "k8s": kubernetes.files,
    "ray": ray.files,
}


def files(placement: Placement, format_: str, profiles: Mapping[str, Profile] | None = None) -> dict[str, str]:
    """The files that start `placement`, by name. `profiles` are those of the plugins by default.

    Raises SolverError for a placement without engines, and for a cache that the engine cannot keep.
    """
    if not placement.engines:
        raise SolverError(
            "there is nothing to start: the placement has no engines", remedy="solve a fleet that has one"
        )
    known = load_plugins().chips.items if profiles is None else profiles
    return FORMATS[format_](placement, members(placement, known))
