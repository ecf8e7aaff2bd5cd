"""LMDeploy 0.18 with what is changed in memory: for a device (`device_v0_16`, `ray_v0_18`, `mp_v0_18`), and for
migrations (`lmdeploy_deeplink.migration.v0_18`). Nothing else touches LMDeploy's own names.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from deeplink.errors import PluginError
from lmdeploy_deeplink.engine import device_v0_16
from lmdeploy_deeplink.engine.platform import CPU


def install(device: str) -> None:
    """For one process; a second call changes nothing. To be called before LMDeploy is used."""
    if device_v0_16.install(device, _cpu_backend, _spread):
        if device == CPU:
            from lmdeploy_deeplink.engine import mp_v0_18

            mp_v0_18.install()
        from lmdeploy_deeplink.migration import v0_18

        v0_18.install()


def _spread(size: int, built_from: Mapping[str, Any]) -> None:
    import lmdeploy.pytorch.engine.engine as engines

    parts = built_from["dist_config"]
    _check_parts(parts)
    chosen = built_from.get("distributed_executor_backend") or engines.get_distributed_executor_backend(
        size, parts.dp, CPU
    )
    if chosen == "ray":
        from lmdeploy_deeplink.engine import ray_v0_18

        ray_v0_18.install()


def _check_parts(parts: Any) -> None:
    for field in ("dp", "ep"):
        if (found := getattr(parts, field)) != 1:
            raise PluginError(
                "an engine on CPUs was tested in several processes only where each has its part of every layer",
                field=field,
                ours="1",
                theirs=str(found),
                remedy="spread it by --tp alone",
            )


@functools.cache
def _cpu_backend() -> Any:
    from lmdeploy_deeplink import reference
    from lmdeploy_deeplink.engine.ops_v0_18 import backend

    return backend(reference.load(), "gloo")
