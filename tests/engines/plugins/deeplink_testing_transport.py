"""The tcp transport with a fault to order: what the flag file says is done to every chunk on its way.

The flag file is `$DEEPLINK_TESTING_FAULT`; without it, or empty, nothing is done. `zero-v` zeroes every V of the
test model (30 layers), `flip` flips one bit of the first byte.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from deeplink.hookspecs import hookimpl
from deeplink.kvconnector.transport.base import Link, Push, Transport
from deeplink.kvconnector.transport.tcp import NAME, TcpTransport

VARIABLE = "DEEPLINK_TESTING_FAULT"
LAYERS = 30


class FaultyLink:
    def __init__(self, link: Link) -> None:
        self._link = link

    def push(self, pushes: Sequence[Push], deadline: float) -> None:
        path = Path(os.environ.get(VARIABLE, "/nonexistent"))
        fault = path.read_text() if path.exists() else ""
        self._link.push([replace(push, source=_spoil(push.source, fault)) for push in pushes], deadline)

    def close(self) -> None:
        self._link.close()


def _spoil(source: memoryview, fault: str) -> memoryview:
    if not fault:
        return source
    bytes_ = np.frombuffer(source, np.uint8).copy()
    if fault == "zero-v":
        bytes_.reshape(LAYERS, 2, -1)[:, 1] = 0
    elif fault == "flip":
        bytes_[0] ^= 1
    return memoryview(bytes_)


class FaultyTransport(TcpTransport):
    def connect(self, address: str, deadline: float) -> Link:
        return FaultyLink(super().connect(address, deadline))


@hookimpl
def deeplink_register_transports(register: Callable[[str, Callable[..., Transport]], None]) -> None:
    register(NAME, FaultyTransport)
