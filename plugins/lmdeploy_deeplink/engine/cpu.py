"""torch's CUDA interface on a host without CUDA.

LMDeploy's engine says "cuda" for whatever device it runs on, and expects the integration of another device to make that
work. For a CPU that means: what is asked for on "cuda" is made in host memory, and streams and events, which order
work on a device, have nothing to order. This changes torch for the whole process. It is for engines on a CPU, and
refused where there is a CUDA device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from deeplink.errors import PluginError

# Of what the host has left, how much counts as the device's: the engine fills most of that with its KV cache at once.
_SHARE = 0.25

_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones"),
    *("ones_like", "rand", "rand_like", "randint", "randn", "tensor", "zeros", "zeros_like"),
)
_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
_done = False


def install() -> None:
    """Once per process; a second call changes nothing."""
    global _done
    if _done:
        return
    if torch.cuda.is_available():
        raise PluginError("this host has a CUDA device, so CUDA's interface is not put on its CPU", field="device")
    for name in _FACTORIES:
        setattr(torch, name, _on_host(getattr(torch, name)))
    for name in _METHODS:
        setattr(torch.Tensor, name, _on_host(getattr(torch.Tensor, name)))
    torch.Tensor.to = _moved(torch.Tensor.to)
    torch.nn.Module.to = _moved(torch.nn.Module.to)
    torch.Tensor.cuda = _itself()
    torch.nn.Module.cuda = _itself()
    torch.Tensor.pin_memory = _itself()
    torch.Tensor.record_stream = _giving(lambda: None)
    torch.Generator = _Generator
    cuda = torch.cuda
    cuda.Stream, cuda.Event = Stream, Event
    only = Stream()
    # A function of its own for each name: torch's compiler keeps a rule per function, and refuses one with two.
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, _giving(lambda: only))
    for name in ("stream", "device"):
        setattr(cuda, name, _giving(contextlib.nullcontext))
    for name in ("synchronize", "empty_cache", "set_device", "manual_seed", "manual_seed_all"):
        setattr(cuda, name, _giving(lambda: None))
    cuda.current_device = _giving(lambda: 0)
    cuda.device_count = _giving(lambda: 1)
    cuda.get_device_name = _giving(lambda: "cpu")
    cuda.mem_get_info = _giving(_memory)
    _done = True


def _host(device: Any) -> Any:
    """What is meant by a device that was asked for. Numbers name CUDA devices, too."""
    if isinstance(device, str):
        return "cpu" if device.startswith("cuda") else device
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    return "cpu" if isinstance(device, int) and not isinstance(device, bool) else device


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def made(*args: Any, **keywords: Any) -> Any:
        if "device" in keywords:
            keywords["device"] = _host(keywords["device"])
        if keywords.get("pin_memory"):
            keywords["pin_memory"] = False
        return function(*args, **keywords)

    return made


def _moved(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def made(self: Any, *args: Any, **keywords: Any) -> Any:
        if args:
            args = (_host(args[0]), *args[1:])
        if "device" in keywords:
            keywords["device"] = _host(keywords["device"])
        return function(self, *args, **keywords)

    return made


def _itself() -> Callable[..., Any]:
    return lambda self, *_, **__: self


def _giving(make: Callable[[], Any]) -> Callable[..., Any]:
    return lambda *_, **__: make()


def _memory() -> tuple[int, int]:
    import psutil

    free = int(psutil.virtual_memory().available * _SHARE)
    return free, free


class _Generator(torch.Generator):
    """A class, because annotations name it as one."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, _host(device))


class Stream:
    """What is put into it is done already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Event:
    """Has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 0.0

    def record(self, stream: Stream | None = None) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass
