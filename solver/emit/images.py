"""Dockerfiles that put deeplink beside the engine, one for each kind of chip, and one for the router."""

from __future__ import annotations

from deeplink.solver.emit.members import Member

ROUTER = "deeplink-router"
_ADD = 'ARG DEEPLINK=deeplink\nRUN pip install --no-cache-dir "$DEEPLINK"\n'
_ROUTER = f"""\
# The router. DEEPLINK may be anything pip installs: a version, a repository, a wheel's address.
FROM python:3.12-slim
{_ADD}ENTRYPOINT ["deeplink"]
"""


def image(member: Member) -> str:
    """The image of a member: the pool's own, or what its Dockerfile is to be built as."""
    return member.engine.image or f"deeplink-{member.host_label}"


def dockerfile(member: Member) -> str:
    return f"Dockerfile.{member.host_label}"


def files(members: tuple[Member, ...]) -> dict[str, str]:
    """A Dockerfile for each image that is not the pool's own."""
    found = {"Dockerfile.router": _ROUTER}
    for member in members:
        if not member.engine.image:
            found[dockerfile(member)] = _engine(member)
    return found


def unknown(members: tuple[Member, ...]) -> list[str]:
    return [
        f"{member.engine.chip}: {why}; see {dockerfile(member)}"
        for member in {one.host_label: one for one in members if not one.engine.image}.values()
        if (why := _missing(member))
    ]


def _engine(member: Member) -> str:
    known = member.served.image if member.served else None
    why = _missing(member)
    lines = [f"# {member.title} with deeplink for {member.engine.chip}. DEEPLINK may be anything pip installs."]
    lines += [f"# {member.engine.chip}: {why}; build it with --build-arg IMAGE=..."] if why else []
    lines += [f"ARG IMAGE={known.value}" if known and not why else "ARG IMAGE", "FROM $IMAGE"]
    return "\n".join(lines) + "\n" + _ADD


def _missing(member: Member) -> str:
    known = member.served.image if member.served else None
    if known is None:
        return f"no image with {member.title} for it is known"
    return "" if ":" in known.value else f"which tag of {known.value} is for it is not known"
