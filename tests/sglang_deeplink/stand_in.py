"""What the plugin imports of SGLang, for tests that run without it; and requests and managers as SGLang makes them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from loopback import Side

_NAMES: dict[str, dict[str, object]] = {
    "sglang.srt.disaggregation.base.conn": {
        "BaseKVManager": object,
        "BaseKVSender": object,
        "BaseKVReceiver": object,
        "BaseKVBootstrapServer": object,
        "KVPoll": SimpleNamespace(Failed=0, Bootstrapping=1, WaitingForInput=2, Transferring=3, Success=4),
        "KVTransferDestination": SimpleNamespace(DEVICE="device"),
        "KVTransferMetric": SimpleNamespace,
    },
    "sglang.srt.configs.model_config": {"ModelConfig": SimpleNamespace},
    "sglang.srt.mem_cache.hicache_storage": {"HiCacheStorage": object},
    "sglang.srt.runtime_context": dict.fromkeys(
        ("get_disagg", "get_memory", "get_server_args", "get_serving"), SimpleNamespace
    ),
    "sglang.srt.utils.network": {
        "NetworkAddress": lambda host, port: SimpleNamespace(to_host_port_str=lambda: f"{host}:{port}")
    },
}


def install() -> None:
    """Nothing where SGLang itself is there."""
    for name, content in _NAMES.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        vars(sys.modules[name]).update(content)


class Rows:
    """A tensor of SGLang's buffers, with as much of a tensor as is used of it."""

    def __init__(self, width: int, value: float = 0.0) -> None:
        self.array = np.full((4, width), value)
        self.shape = self.array.shape

    def __getitem__(self, row: int) -> Any:
        return _Row(self.array[row])

    def __setitem__(self, place: tuple[int, int], value: float) -> None:
        self.array[place] = value


class _Row:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def zero_(self) -> None:
        self._array[:] = 0

    def __setitem__(self, place: int, value: float) -> None:
        self._array[place] = value


def buffers() -> SimpleNamespace:
    names = ("output_ids", "cached_tokens", "output_token_logprobs_val", "output_token_logprobs_idx", "bootstrap_room")
    top = ("output_top_logprobs_val", "output_top_logprobs_idx")
    return SimpleNamespace(**{name: Rows(16) for name in names}, **{name: Rows(8) for name in top})


def request(tokens: int, host: str | None, **fields: object) -> SimpleNamespace:
    """As SGLang's scheduler holds it; its first token is 17."""
    none = dict.fromkeys(
        ("lora_id", "multimodal_inputs", "input_embeds", "positional_embed_overrides", "cache_salt", "extra_key")
    )
    return SimpleNamespace(
        **{
            **none,
            "rid": "request",
            "origin_input_ids": list(range(tokens)),
            "bootstrap_host": host,
            "bootstrap_room": 1,
            "return_sampling_mask": False,
            "return_logprob": False,
            "output_ids": [17],
            "cached_tokens": 0,
            **fields,
        }
    )


def manager(side: Side, page_size: int, secret: bytes) -> Any:
    """One that is attached to this side of a loopback."""
    from sglang_deeplink.process import DeepLinkKVManager

    made: Any = DeepLinkKVManager.__new__(DeepLinkKVManager)
    made.secret, made.epoch, made.page_size = secret, side.epoch, page_size
    made.buffers, made._endpoint, made._outcomes = buffers(), side.endpoint, {}
    made.foreign_seconds = 0.0
    return made
