"""vLLM 0.29: as 0.32, but a failed load is told by its blocks, and a step without a forward pass saves nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_deeplink.versions import v0_32
from vllm_deeplink.versions.expected import COMMON, CONNECTOR, Expected
from vllm_deeplink.versions.version import Version

if TYPE_CHECKING:
    from vllm_deeplink.worker import WorkerHalf

BY_BLOCKS = Expected(
    overridden={CONNECTOR: {"get_finished": ("finished_req_ids",), "get_block_ids_with_load_errors": ()}}
)


class Reports:
    _worker: WorkerHalf | None
    _failed_blocks: frozenset[int] = frozenset()
    wait_for_save: Callable[[], None]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        # This vLLM calls wait_for_save only in steps that compute something, but what a step without a forward pass
        # ends (an abort, a lost block) has to be carried out too, and what waits for room in staging goes on in it.
        self.wait_for_save()
        assert self._worker is not None
        settled = self._worker.results(finished_req_ids)
        self._failed_blocks = frozenset(settled.failed.values())
        return settled.sent, settled.received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Asked right after `get_finished`. One block per failed load: what comes after it is void as well."""
        return set(self._failed_blocks)


VERSION = Version(
    name="0.29.0",
    expected=COMMON | BY_BLOCKS | Expected(called=v0_32.CPU_BUILDER),
    reports=Reports,
    packing=v0_32.packing,
    several_groups=False,
)
