"""What of LMDeploy is changed in memory for a device that it does not know, alike in 0.16 to 0.18, and why.

- The option ``--backend deeplink`` (its parsers are built when the command line runs), which stands for the PyTorch
  engine on the device of this host.
- Lists of device names that are closed, for the device ``cpu``: the check of `PytorchEngineConfig`, the choices of
  ``--device``, which backend a device has, its batch size, and whether it has bfloat16.
- The channel through which an engine's process says its port: LMDeploy ends it as soon as the port is there, while the
  process may still be saying it, and a start then fails now and then on a busy host.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from lmdeploy_deeplink.engine.platform import CPU, NATIVE, OPTION

# What a CPU serves at once is bounded by its arithmetic long before.
_CPU_BATCH = 64

_installed: set[str] = set()


def install(device: str, backend: Callable[[], Any], several: Callable[[int, Mapping[str, Any]], None]) -> bool:
    """All of it, for one process; a second call changes nothing. To be called before LMDeploy is used. Returns whether
    this was the first.

    `backend` gives the class that makes the layers of an engine on the CPU. `several` is told of how many processes
    such an engine is to be, and what LMDeploy builds its executor from, before it is built; it refuses that or prepares
    for it.
    """
    if device in _installed:
        return False
    _installed.add(device)
    if device == CPU:
        from lmdeploy_deeplink.engine import cpu

        cpu.install()
        know_cpu(backend)
        _before_several(several)
    add_option(device)
    wait_for_the_port()
    return True


def _before_several(several: Callable[[int, Mapping[str, Any]], None]) -> None:
    import lmdeploy.pytorch.engine.engine as engines

    build = engines.build_executor

    @functools.wraps(build)
    def built(*args: Any, **keywords: Any) -> Any:
        size = keywords["dist_config"].world_size
        if keywords["device_type"] == CPU and size > 1:
            several(size, keywords)
        return build(*args, **keywords)

    engines.build_executor = built


def add_option(device: str) -> None:
    """For LMDeploy's command line, in any process."""
    from lmdeploy.cli.cli import CLI
    from lmdeploy.cli.utils import ArgumentHelper

    add = ArgumentHelper.backend

    def backend(parser: Any) -> Any:
        action = add(parser)
        action.choices = [*action.choices, OPTION]
        action.help = f"{action.help}; {OPTION} is the PyTorch engine on the device of this host, here {device}"
        return action

    ArgumentHelper.backend = staticmethod(backend)
    parse = CLI.parser.parse_args

    def parse_args(*args: Any, **keywords: Any) -> Any:
        words = parse(*args, **keywords)
        if getattr(words, "backend", None) == OPTION:
            words.backend, words.device = "pytorch", device
        return words

    CLI.parser.parse_args = parse_args


def know_cpu(backend: Callable[[], Any]) -> None:
    """`backend` gives the class that makes the layers of an engine on the CPU."""
    import lmdeploy.messages as messages
    import lmdeploy.utils as utils
    from lmdeploy.cli.utils import ArgumentHelper

    config = messages.PytorchEngineConfig
    check = config.__post_init__

    def checked(self: Any) -> None:
        if self.device_type != CPU:
            check(self)
            return
        # All that is checked of another device holds of this one, but its name.
        self.device_type = "maca"
        try:
            check(self)
        finally:
            self.device_type = CPU

    config.__post_init__ = checked
    default, choices = ArgumentHelper.device.__defaults__
    ArgumentHelper.device.__defaults__ = (default, [*choices, CPU])
    utils.get_max_batch_size = _with_cpu(utils.get_max_batch_size, _CPU_BATCH)
    utils.is_bf16_supported = _with_cpu(utils.is_bf16_supported, True)
    # `lmdeploy.utils` was imported by name by those that came first.
    import lmdeploy.cli.serve as serve

    serve.get_max_batch_size = utils.get_max_batch_size

    import lmdeploy.pytorch.backends.selector as selector

    native = selector._get_backend

    def get_backend() -> Any:
        # "cuda" is what a worker's device is before it is told which.
        if selector.get_device_manager().current_context().device_type in (CPU, NATIVE):
            return backend()
        return native()

    selector._get_backend = get_backend


def _with_cpu(function: Callable[..., Any], value: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(device_type: str = "cuda") -> Any:
        # "cuda" is what an engine says when it means its device.
        return value if device_type in (CPU, "cuda", "auto") else function(device_type)

    return called


def wait_for_the_port() -> None:
    """For the process that starts the engine's."""
    import lmdeploy.pytorch.engine.mp_engine.zmq_engine as zmq_engine

    processes = zmq_engine.mp
    kept: list[Any] = []

    def manager() -> Any:
        kept.append(processes.Manager())
        # It ends with this process, instead of when the port is known.
        return contextlib.nullcontext(kept[-1])

    zmq_engine.mp = SimpleNamespace(
        Manager=manager, get_context=processes.get_context, Condition=getattr(processes, "Condition", None)
    )
