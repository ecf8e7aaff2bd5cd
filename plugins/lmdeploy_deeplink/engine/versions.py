"""The releases of LMDeploy that this was tested with. What is changed in memory holds for these and no other."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

from deeplink.errors import PluginError

TESTED = {
    "0.16.0": "lmdeploy_deeplink.engine.v0_16",
    "0.17.0": "lmdeploy_deeplink.engine.v0_16",
    "0.18.0": "lmdeploy_deeplink.engine.v0_18",
}


class Hooks(Protocol):
    """What a module for one release has."""

    def install(self, device: str) -> None: ...


def hooks() -> Hooks:
    """The module for the installed LMDeploy. Raises PluginError naming both versions where there is none."""
    try:
        installed = version("lmdeploy")
    except PackageNotFoundError as exc:
        raise PluginError(
            "LMDeploy is not installed", remedy=f"pip install lmdeploy=={max(TESTED)}, or run its own Python"
        ) from exc
    if installed not in TESTED:
        raise PluginError(
            "this LMDeploy is no release that deeplink was tested with",
            field="lmdeploy",
            ours=", ".join(TESTED),
            theirs=installed,
            remedy="install one of these; LMDeploy has no plugin interface, so another release may mean other things",
        )
    made: Hooks = import_module(TESTED[installed])
    return made
