"""What of LMDeploy 0.18 is changed in memory for an engine on the CPU that Ray has spread over several processes.

- Ray hands out what it has been told that there is, and LMDeploy asks it for chips by their kinds. A CPU's is `CHIP`:
  a cluster that LMDeploy starts has as many as it needs, one that is there already has to be told.
- How LMDeploy gives each worker a chip of its own depends on their kind; CPUs are treated as chips that torch counts.
- A worker is a process of Ray's, which knows nothing of deeplink but by `lmdeploy_deeplink.engine.workers`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from deeplink.errors import PluginError
from lmdeploy_deeplink.engine import waiting, workers
from lmdeploy_deeplink.engine.platform import CPU

CHIP = "deeplink_cpu"
# What passes between an engine and its workers in a step are tokens; LMDeploy takes a third of the host's memory.
_OBJECT_BYTES = 256 * 1024 * 1024

_installed = False


def install() -> None:
    """In the engine's process, before it starts workers. A second call changes nothing.

    Raises PluginError where those would not know deeplink.
    """
    global _installed
    if not workers.enabled():
        raise PluginError(
            "Ray starts the processes of this engine, and nothing brings deeplink into them",
            field="tp",
            remedy="run `python -m deeplink.cli serve workers enable` with the engine's Python on every node",
        )
    if _installed:
        return
    _installed = True
    import lmdeploy.pytorch.engine.executor.ray_executor as executors
    import lmdeploy.pytorch.envs as envs
    import lmdeploy.pytorch.ray as clusters

    # Of a cluster that is there already, workers have not this process's environment. What deeplink reads of it they
    # read, too: where each of them hands over its part of the cache, they have to be as this process is.
    envs._ENVS |= {name: value for name, value in os.environ.items() if name.startswith("DEEPLINK_")}
    envs._ENVS[waiting.VARIABLE] = CPU
    clusters.get_device_str = executors.get_device_str = _named(clusters.get_device_str)
    clusters.init_ray_cluster = _started(clusters.init_ray_cluster)
    executor = executors.RayExecutor
    executor._init_distributed_environment_by_device = _placed(executor._init_distributed_environment_by_device)


def _named(name: Callable[..., str]) -> Callable[..., str]:
    from lmdeploy.pytorch.devices import get_device_manager

    @functools.wraps(name)
    def named(device_type: str | None = None) -> str:
        device = device_type or get_device_manager().current_context().device_type
        return CHIP if device == CPU else name(device)

    return named


def _started(start: Callable[..., Any]) -> Callable[..., Any]:
    import ray

    @functools.wraps(start)
    def started(world_size: int, ray_address: str | None = None, dp: int = 1, device_type: str = "cuda") -> Any:
        if device_type == CPU:
            if not ray.is_initialized():
                _start(ray, world_size, ray_address)
            there = ray.cluster_resources().get(CHIP, 0)
            if there < world_size:
                raise PluginError(
                    "the Ray cluster has fewer of these than the engine has processes",
                    field=CHIP,
                    ours=str(world_size),
                    theirs=f"{there:g}",
                    remedy=f"say at a node's start how many: ray start --resources '{{\"{CHIP}\": {world_size}}}'",
                )
        return start(world_size, ray_address, dp, device_type)

    return started


def _start(ray: Any, count: int, address: str | None) -> None:
    try:
        ray.init(address=address, num_cpus=count, resources={CHIP: count}, object_store_memory=_OBJECT_BYTES)
    except ValueError:
        # So Ray says that there is a cluster, which cannot be told what it has.
        ray.init(address=address)


def _placed(place: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(place)
    def placed(self: Any, device: str) -> None:
        place(self, "camb" if device == CPU else device)

    return placed
