"""LMDeploy's PyTorch engine on a device that LMDeploy does not know, and the option that asks for it.

LMDeploy has no entry points, so its own code is changed in memory, in every process of an engine, before it runs.

    platform   which of LMDeploy's devices this host has, or cpu
    versions   the releases that this was tested with; others are refused
    v0_18      all that is changed in 0.18; v0_16, in 0.16 and 0.17
    device_v0_16  what is changed for a device, alike in all of these
    layers     the engine's layers out of a vendor's operators; ops_v0_18 and ops_v0_16, how LMDeploy asks for them
    ray_v0_18  an engine on the CPU in several processes of Ray's
    mp_v0_18   an engine on the CPU in several processes of LMDeploy's
    workers    the file by which those learn of deeplink; waiting is what it has them do
    cpu        torch's CUDA interface on a host without CUDA, which an engine on a CPU calls
    launch     LMDeploy's command line with all that; a module to be run
    command    `deeplink serve lmdeploy`, and `deeplink serve workers`

In Python, before anything of LMDeploy's is imported::

    from lmdeploy_deeplink import engine

    device = engine.install()
    pipe = lmdeploy.pipeline(model, backend_config=lmdeploy.PytorchEngineConfig(device_type=device))
"""

from __future__ import annotations


def install() -> str:
    """Make LMDeploy run here, and give the `device_type` to run it on. A second call changes nothing.

    Raises PluginError where LMDeploy is not installed, or is a release that was not tested.
    """
    from lmdeploy_deeplink.engine import platform, versions

    device = platform.resolve()
    versions.hooks().install(device)
    return device
