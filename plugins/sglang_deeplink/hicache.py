"""A storage backend for SGLang's hierarchical cache whose pages engines with other page sizes and layouts can read.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "deeplink",
      "module_path": "sglang_deeplink.hicache", "class_name": "DeepLinkHiCache", "interface_v1": 1, "path": FOLDER}'

Who calls what, in the scheduler's process:

| method | thread | |
|---|---|---|
| the constructor, register_mem_pool_host, on_host_pools_registered, close | the scheduler's | once |
| batch_exists, batch_get_v1 | SGLang's for reading ahead | for each request that may find something |
| batch_set_v1 | SGLang's for writing | for each node of the tree that is new in host memory |
| weights_changed | the scheduler's | before other weights are loaded |

The pages it is called with are SGLang's, which locks them meanwhile; they are in host memory, and nothing else writes
to them.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pydantic
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.runtime_context import get_memory, get_server_args

from deeplink.errors import ConfigError
from deeplink.kvconnector.prefixes import space as prefix_space
from deeplink.kvconnector.prefixes.names import check_sizes
from deeplink.kvconnector.prefixes.pages import Pages
from deeplink.kvconnector.prefixes.store import Counts, Store
from deeplink.kvconnector.relayout import compiled
from sglang_deeplink import adapter, host_pool, naming

if TYPE_CHECKING:
    import torch

log = logging.getLogger("sglang.deeplink")

GIB = 1 << 30
KV_POOL = "kv"
SHOWN = 4
"""Of the fields in which another space of the store differs."""

_active: DeepLinkHiCache | None = None


class Settings(pydantic.BaseModel):
    """What is in ``--hicache-storage-backend-extra-config``, without what SGLang has taken out for itself.

    `path` is the store's folder, `gib` what all of it may take, and `unit` the tokens that are stored together: it
    divides the page sizes of all engines that share the store.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    backend_name: str
    module_path: str
    class_name: str
    interface_v1: Literal[1]
    path: Path
    gib: Annotated[float, pydantic.Field(gt=0)] = 8.0
    unit: Annotated[int, pydantic.Field(ge=1, le=4096)] = 16


class DeepLinkHiCache(HiCacheStorage):
    def __init__(self, storage_config: Any, kwargs: dict[str, Any]) -> None:
        """Raises ConfigError, naming the field, for settings that are wrong or not supported with it."""
        self._settings = _read(storage_config.extra_config or {})
        self._server_args = get_server_args()
        self._pages: Pages | None = None
        self._valid = True
        check_supported(self._server_args)
        check_sizes(self._server_args.page_size, self._settings.unit)
        if naming.tree() != naming.PYTHON_TREE:
            raise ConfigError(
                "SGLang's tree of prefixes does not name pages as the store needs it",
                field="hicache-storage-backend",
                ours=f"a tree in {naming.tree() or 'nothing that was hooked into'}",
                theirs=naming.PYTHON_TREE,
                remedy="name the backend when the engine starts, with the default radix cache",
            )

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Read the layout from the live pool, prove it, and open the store."""
        super().register_mem_pool_host(mem_pool_host)
        compiled.warm()
        group = host_pool.read(mem_pool_host)
        host_pool.prove(mem_pool_host, group.values, get_memory().hicache_io_backend)
        config = ModelConfig.from_server_args(self._server_args)
        if config.is_multimodal or config.get_total_num_kv_heads() != group.spec.heads:
            raise ConfigError(
                "this release stores prefixes of models of text that one rank has all of",
                field="model",
                ours=f"{', '.join(config.hf_config.architectures)}, {group.spec.heads} heads here",
                theirs=f"{config.get_total_num_kv_heads()} heads",
            )
        space = prefix_space.of_group(adapter.read_model(config), group.spec, self._settings.unit)
        store = Store(self._settings.path, int(self._settings.gib * GIB), space)
        self._pages = Pages(group.values, store)
        for other in store.others():
            fields = list(prefix_space.differences(space, other))[:SHOWN]
            told = "; ".join(f"{name} is {ours} here and {theirs} there" for name, ours, theirs in fields)
            log.info("deeplink's store has prefixes that are not read by this engine: %s", told)
        log.info("deeplink stores prefixes in %s, space %s", self._settings.path, space.key)

    def on_host_pools_registered(self) -> None:
        names = [str(name) for name in getattr(self, "registered_pools", {})]
        if others := [name for name in names if name != KV_POOL]:
            raise ConfigError(
                "this release stores the pages of models with one kind of cache",
                field="host pools",
                ours=", ".join(names),
                theirs=KV_POOL,
                remedy=f"serve this model without a storage backend; {others[0]} would be missing from a prefix",
            )
        global _active
        _active = self
        naming.use(self._settings.unit)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._of_weights().present(keys) if self._valid else 0

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        blocks = self._blocks(keys, host_indices)
        found = self._of_weights().read(keys, blocks) if self._valid else [False] * len(keys)
        self._report("read", keys, blocks, found)
        return found

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        blocks = self._blocks(keys, host_indices)
        stored = self._of_weights().write(keys, blocks) if self._valid else [False] * len(keys)
        self._report("wrote", keys, blocks, stored)
        return stored

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Remove this model's prefixes, those that other engines have written, too."""
        self._of_weights().store.clear()

    def close(self) -> None:
        global _active
        if _active is self:
            _active = None
            naming.use(0)
        if self._pages is not None:
            log.info("deeplink's store, in units of %d tokens: %s", self._settings.unit, self.counts())
            self._pages.store.close()
            self._pages = None

    def counts(self) -> Counts:
        return self._of_weights().store.counts()

    def invalidate(self) -> None:
        """Nothing is read or written any more."""
        if self._valid:
            self._valid = False
            log.warning(
                "other weights are loaded than those whose prefixes the store has (field model.weights): deeplink "
                "neither reads nor writes it from now on; start the engine with the new weights to use it again"
            )

    def _older(self, *arguments: Any, **options: Any) -> Any:
        """SGLang's older interface moves pages in whatever order its pool has them in, and does not say which. Its base
        class asks for it, and `interface_v1` keeps SGLang from calling it."""
        raise ConfigError(
            "deeplink's storage backend moves pages by SGLang's newer interface only",
            field="interface_v1",
            remedy='set "interface_v1": 1 in --hicache-storage-backend-extra-config',
        )

    get = batch_get = set = batch_set = _older

    def _of_weights(self) -> Pages:
        if self._pages is None:
            raise ConfigError("SGLang uses the store before it has named its host pool, or after it has closed it")
        return self._pages

    def _blocks(self, keys: list[str], host_indices: torch.Tensor) -> list[int]:
        """The pages of the pool that the slots are. Raises ConfigError for slots that are not whole pages in a row."""
        page = self.mem_pool_host.page_size
        slots = host_indices.cpu().numpy()
        first = slots[::page] // page
        if len(slots) != len(keys) * page or (slots != (first[:, None] * page + np.arange(page)).reshape(-1)).any():
            raise ConfigError(f"SGLang names slots of its host pool that are not whole pages of {page} in a row")
        blocks: list[int] = first.tolist()
        return blocks

    def _report(self, what: str, keys: list[str], blocks: list[int], done: list[bool]) -> None:
        if not log.isEnabledFor(logging.DEBUG):
            return
        good = [(key, block) for key, block, there in zip(keys, blocks, done, strict=True) if there]
        value = self._of_weights().digest([key for key, _ in good], [block for _, block in good])
        log.debug(
            "%s %d of %d pages, digest %016x, %s", what, len(good), len(keys), value, dataclasses.asdict(self.counts())
        )


def weights_changed() -> None:
    """Other weights are about to be loaded into this process."""
    if _active is not None:
        _active.invalidate()


def check_supported(server_args: Any) -> None:
    """Refuse by the name of the setting what prefixes were not proven with, or what they depend on beside the model."""
    for field, only in (
        ("tp_size", 1),
        ("pp_size", 1),
        ("dp_size", 1),
        ("attn_cp_size", 1),
        ("dcp_size", 1),
        ("disaggregation_mode", "null"),
        ("hicache_host_memory_mode", "cache"),
        ("enable_lora", None),
        ("speculative_algorithm", None),
        ("enable_hisparse", False),
        ("enable_unified_memory", False),
        ("enable_memory_saver", False),
        ("load_format", "auto"),
        ("json_model_override_args", "{}"),
        ("torchao_config", ""),
    ):
        value = getattr(server_args, field, only)
        if value != only and (value or only):
            raise ConfigError(
                "this release does not store prefixes with it",
                field=field.replace("_", "-"),
                ours=str(value),
                theirs=str(only) if only else "not set",
            )


def _read(extra_config: dict[str, Any]) -> Settings:
    try:
        return Settings.model_validate(extra_config)
    except pydantic.ValidationError as exc:
        first = exc.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"--hicache-storage-backend-extra-config: {first['msg']}",
            field=name,
            ours=str(extra_config.get(name, "not set")),
            remedy="docs/sglang.md lists what belongs there",
        ) from exc
