"""LMDeploy's cache pools and model config, in kvconnector's terms. Tested with LMDeploy 0.18."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from deeplink.errors import ConfigError, LayoutError
from deeplink.kvconnector.caches import proof
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.caches.group import Group
from deeplink.kvconnector.contracts import rope, weights
from deeplink.kvconnector.contracts.contract import CacheGroup, Contract, Model, Rank
from deeplink.kvconnector.contracts.negotiate import FULL
from deeplink.kvconnector.control import Blocks
from deeplink.kvconnector.layouts.layout import Layout
from deeplink.kvconnector.relayout import device
from deeplink.kvconnector.relayout.convert import storage_dtype
from deeplink.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

PACKED = "lmdeploy-cuda"
DTYPES = ("bfloat16", "float16")
ROLES = {"Prefill": "prefill", "Decode": "decode"}


@dataclass(frozen=True, slots=True)
class Place:
    """A process among the `size` that an engine is spread over, each with as many heads of every layer."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class Stated:
    """What all processes of an engine state alike."""

    chip: str
    role: str
    model: Model

    def contract(
        self,
        group: Group,
        place: Place,
        epoch: str,
        channel: str,
        transports: dict[str, str],
        casts: tuple[str, ...],
    ) -> Contract:
        from lmdeploy import __version__

        rank = Rank(place.rank, 0, 0, (group.heads,), (0, len(group.layers)), channel, transports)
        return Contract(
            engine="lmdeploy",
            engine_version=__version__,
            chip=self.chip,
            role=self.role,
            epoch=epoch,
            model=self.model,
            groups=(group.spec,),
            ranks=(rank,),
            casts=casts,
        )


def check_supported(engine: Any) -> None:
    """Refuse at start-up, by the name of the setting, what this release cannot hand over."""
    config = engine.engine_config
    for field, value, needed in (
        ("role", config.role.name, tuple(ROLES)),
        ("dp", config.dp, (1,)),
        ("ep", config.ep, (1,)),
        # Of heads that several processes hold alike LMDeploy counts each.
        ("num_replicate_key_value_heads", engine.model_config.num_replicate_key_value_heads, (1,)),
        ("quant-policy", int(config.quant_policy), (0,)),
        ("enable-prefix-caching", bool(config.enable_prefix_caching), (False,)),
        ("kernel-block-size", engine.cache_config.kernel_block_size, (engine.cache_config.block_size,)),
        ("window", max(engine.cache_config.window_size, 0), (0,)),
    ):
        if value not in needed:
            raise ConfigError(
                f"this release migrates only with one of: {field}",
                field=field,
                ours=str(value),
                theirs=", ".join(map(str, needed)),
            )


def read_group(engine: Any, known: Registry[str]) -> Group:
    """The cache of an engine of one process; see `read_part`."""
    held = engine.executor.model_agent.cache_engine
    return read_part(held, engine.model_config.num_key_value_heads, Place(), known)


def read_part(held: Any, total: int, place: Place, known: Registry[str]) -> Group:
    """A process's part of the cache with its arrays, from the live tensors of LMDeploy's cache engine `held`, proven.
    There are `total` heads in all processes. Raises LayoutError for anything else."""
    pools = held.gpu_allocation.pools
    if len(pools) != 1 or pools[0].entry_axis != 1:
        raise LayoutError(
            f"a cache of {len(pools)} pools; this release reads the one in which K and V of a block lie together",
            field="layout",
            ours=PACKED,
        )
    pool = pools[0].tensor
    if pool.device.type != "cpu":
        raise LayoutError(f"a cache in {pool.device} memory; this release reads host memory", field="device")
    keys, values = ([layer[side] for layer in held.local_gpu_cache] for side in (0, 1))
    blocks, block_size, heads, dim = keys[0].shape
    dtype = str(keys[0].dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise LayoutError(f"a cache of {dtype}; this plugin reads {', '.join(DTYPES)}", field="dtype", theirs=dtype)
    itemsize = keys[0].element_size()
    size = 2 * block_size * heads * dim * itemsize
    if tuple(pool.shape) != (len(keys), blocks, size) or not pool.is_contiguous():
        raise LayoutError(
            f"a pool of shape {tuple(pool.shape)}",
            field="strides",
            ours=str((len(keys), blocks, size)),
            theirs=str(tuple(pool.shape)),
            remedy="blocks that are padded are not read by this release",
        )
    if heads * place.size != total:
        raise LayoutError(
            f"a cache of {heads} heads in each of {place.size} processes, of a model with {total}",
            field="heads",
            ours=str(total),
            theirs=str(heads * place.size),
        )
    text = known.get(PACKED)
    bound = Layout.parse(text).bind(heads=heads, head_dim=dim, block_size=block_size, blocks=blocks)
    layers = tuple(range(len(keys)))
    arrays = tuple(pool[layer].view(-1).numpy().view(storage_dtype(dtype)) for layer in layers)
    cache = Cache(arrays, bound)
    _prove(cache, keys, values)
    mine = (place.rank * heads, (place.rank + 1) * heads)
    return Group(CacheGroup(FULL, layers, total, dim, dtype, block_size, text), layers, mine, cache)


def _prove(cache: Cache, keys: list[Tensor], values: list[Tensor]) -> None:
    """Through the tensors that the engine's layers write to; leaves the blocks zeroed."""
    import torch

    size = cache.bound.block_size

    def write(layer: int, key_THD: npt.NDArray[Any], value_THD: npt.NDArray[Any], slots: npt.NDArray[np.int64]) -> None:
        with torch.inference_mode():  # in which they were made
            for tensor, states in ((keys[layer], key_THD), (values[layer], value_THD)):
                tensor[slots // size, slots % size] = device.of_elements(states, tensor.dtype)

    proof.prove(cache, write, [f"layer {layer}" for layer in range(cache.depth)])


def read_model(engine: Any, folder: str) -> Model:
    """Model identity, with the weights fingerprint of the checkpoint on disk."""
    config = engine.model_config
    hf = config.hf_config
    quantization = getattr(hf, "quantization_config", None) or {}
    return Model(
        architecture=", ".join(hf.architectures),
        layers=config.num_layers,
        vocabulary=config.vocab_size,
        rope=rope.canonical(hf),
        quantization=str(quantization.get("quant_method", "none")),
        weights=weights.fingerprint(weights.checkpoint(folder)),
    )


def blocks(engine: Any) -> Blocks:
    """As many as requests can have, and those that they hold now."""
    held = engine.scheduler.block_manager
    total = held.num_gpu_blocks - engine.cache_config.num_reserved_gpu_blocks
    return Blocks(total, total - int(held.get_num_free_gpu_blocks()))


def stated(engine: Any, model: Model) -> Stated:
    config = engine.engine_config
    return Stated(config.device_type, ROLES[config.role.name], model)
