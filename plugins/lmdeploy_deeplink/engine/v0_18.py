"""LMDeploy 0.18 with what is changed in memory: for a device (`device_v0_16`, `ray_v0_18`), and for migrations
(`lmdeploy_deeplink.migration.v0_18`). Nothing else touches LMDeploy's own names.
"""

from __future__ import annotations

import functools
from typing import Any

from deeplink.errors import PluginError
from lmdeploy_deeplink.engine import device_v0_16
from lmdeploy_deeplink.engine.platform import CPU

_installed: set[str] = set()


def install(device: str) -> None:
    """For one process; a second call changes nothing. To be called before LMDeploy is used."""
    if device in _installed:
        return
    _installed.add(device)
    if device == CPU:
        from lmdeploy_deeplink.engine import cpu

        cpu.install()
        device_v0_16.know_cpu(_cpu_backend)
        _spread_cpus()
    device_v0_16.add_option(device)
    device_v0_16.wait_for_the_port()
    from lmdeploy_deeplink.migration import v0_18

    v0_18.install()


def _spread_cpus() -> None:
    import lmdeploy.pytorch.engine.engine as engines

    build = engines.build_executor

    @functools.wraps(build)
    def built(*args: Any, **keywords: Any) -> Any:
        size = keywords["dist_config"].world_size
        if keywords["device_type"] == CPU and size > 1:
            chosen = keywords.get("distributed_executor_backend") or engines.get_distributed_executor_backend(
                size, keywords["dist_config"].dp, CPU
            )
            _check_spread(chosen, keywords["cache_config"].max_batches)
            from lmdeploy_deeplink.engine import ray_v0_18

            ray_v0_18.install()
        return build(*args, **keywords)

    engines.build_executor = built


def _check_spread(chosen: str, batch: int) -> None:
    if chosen != "ray":
        raise PluginError(
            "of requests that run together, LMDeploy's own worker processes answer only some",
            field="distributed-executor-backend",
            ours="ray",
            theirs=chosen,
        )
    if batch > 1:
        raise PluginError(
            "an engine of several processes on CPUs was tested with one request at a time",
            field="max-batch-size",
            ours="1",
            theirs=str(batch),
        )


@functools.cache
def _cpu_backend() -> Any:
    from lmdeploy_deeplink import reference
    from lmdeploy_deeplink.engine.ops_v0_18 import backend

    return backend(reference.load(), "gloo")
