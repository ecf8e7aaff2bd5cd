"""LMDeploy 0.16 and 0.17 with what is changed in memory for a device (`device_v0_16`). Engines of one process.

There is no migration backend of deeplink's for them, so they hand nothing over.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from deeplink.errors import PluginError
from lmdeploy_deeplink.engine import device_v0_16


def install(device: str) -> None:
    """For one process; a second call changes nothing. To be called before LMDeploy is used."""
    device_v0_16.install(device, _cpu_backend, _refuse)


def _refuse(size: int, built_from: Mapping[str, Any]) -> None:
    raise PluginError(
        "an engine on CPUs of more than one process was not tested with this release of LMDeploy",
        field="tp",
        ours="1",
        theirs=str(size),
        remedy="use LMDeploy 0.18",
    )


@functools.cache
def _cpu_backend() -> Any:
    from lmdeploy_deeplink import reference
    from lmdeploy_deeplink.engine.ops_v0_16 import backend

    return backend(reference.load(), "gloo")
