"""LMDeploy 0.16 and 0.17 with what is changed in memory for a device (`device_v0_16`). Engines of one process.

There is no migration backend of deeplink's for them, so they hand nothing over.
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
        _refuse_several()
    device_v0_16.add_option(device)
    device_v0_16.wait_for_the_port()


def _refuse_several() -> None:
    import lmdeploy.pytorch.engine.engine as engines

    build = engines.build_executor

    @functools.wraps(build)
    def built(*args: Any, **keywords: Any) -> Any:
        size = keywords["dist_config"].world_size
        if keywords["device_type"] == CPU and size > 1:
            raise PluginError(
                "an engine on CPUs of more than one process was not tested with this release of LMDeploy",
                field="tp",
                ours="1",
                theirs=str(size),
                remedy="use LMDeploy 0.18",
            )
        return build(*args, **keywords)

    engines.build_executor = built


@functools.cache
def _cpu_backend() -> Any:
    from lmdeploy_deeplink import reference
    from lmdeploy_deeplink.engine.ops_v0_16 import backend

    return backend(reference.load(), "gloo")
