"""The vendors of this package, for deeplink's plugin loader. Neither torch nor dlinfer is imported here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from deeplink import hookimpl
from lmdeploy_deeplink import dlinfer, reference

if TYPE_CHECKING:
    from lmdeploy_deeplink.operators.vendor import Vendor


@hookimpl
def deeplink_register_operators(register: Callable[[str, Callable[[], Vendor]], None]) -> None:
    register(reference.NAME, reference.load)
    register(dlinfer.NAME, dlinfer.load)
