"""What one version of vLLM has of its own, as the rest of the plugin sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deeplink.errors import ConfigError
from vllm_deeplink.versions.expected import Expected


@dataclass(frozen=True, slots=True)
class Version:
    """`name` is the release that is tested on real engines.

    `reports` is a base class of the connector: how a worker's results reach that vLLM's scheduler. `packing` is the
    name by which an attention layer's implementation says how it packs the CPU cache (empty: it does not say).
    `several_groups`: a failed load is told by its request, without which a model's several cache groups cannot be
    handed over, for their block numbers overlap. `speculation` are the ways to speculate that keep nothing in the KV
    cache, so that what is handed over is the same with them and without, and with which that was tested. `replicas`
    says whether several data-parallel replicas of an engine were, `pipelines` whether pipelines were, and `nodes`
    whether ranks on several hosts were.
    """

    name: str
    expected: Expected
    reports: type
    packing: Callable[[Any], str]
    several_groups: bool
    speculation: tuple[str, ...] = ()
    replicas: bool = False
    pipelines: bool = False
    nodes: bool = False

    def check_groups(self, count: int) -> None:
        """Refuse several cache groups where a failed load could not be told from a good one."""
        if count > 1 and not self.several_groups:
            raise ConfigError(
                f"vLLM as of {self.name} tells a failed load by its blocks, which several cache groups number alike",
                field="KV cache groups",
                ours=str(count),
                theirs="1",
                remedy="use vLLM 0.32",
            )
