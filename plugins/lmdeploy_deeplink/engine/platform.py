"""Which device an LMDeploy engine runs on here."""

from __future__ import annotations

from deeplink.errors import PluginError

OPTION = "deeplink"
"""What is asked for by name: this backend, and the migration backend that belongs to it."""
CPU = "cpu"
NATIVE = "cuda"


def resolve() -> str:
    """LMDeploy's name of the device: its own kernels on CUDA, dlinfer's on the chip it is built for, else cpu.

    A dlinfer that is installed but does not load is an error, not a reason to compute on the CPU.
    """
    import importlib.util

    if importlib.util.find_spec("dlinfer") is not None:
        try:
            from dlinfer.vendor import vendor_name
        except (ImportError, OSError, RuntimeError, AttributeError) as exc:
            raise PluginError(
                f"dlinfer is installed and does not load: {exc!r}",
                remedy="repair it, or uninstall it to run on another device",
            ) from exc
        return str(vendor_name)
    import torch

    return NATIVE if torch.cuda.is_available() else CPU
