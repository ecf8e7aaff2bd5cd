"""A place for vLLM's OffloadingConnector to put blocks on an engine without a GPU: its own wants CUDA to copy with.

All but the copying is vLLM's: what is stored when, what is found, and what is loaded."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> HostWorker:
        assert self.blocks_per_chunk == 1
        return HostWorker([one.tensor for one in kv_caches.tensors], self.num_chunks)


class HostWorker(OffloadingWorker):
    """Copies at once, and says so at the next look."""

    def __init__(self, blocks: list[torch.Tensor], chunks: int) -> None:
        self._blocks = blocks
        self._chunks = [torch.zeros((chunks, *one.shape[1:]), dtype=one.dtype) for one in blocks]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for blocks, chunks in zip(self._blocks, self._chunks, strict=True):
            chunks[torch.from_numpy(dst_spec.block_ids).long()] = blocks[torch.from_numpy(src_spec.block_ids).long()]
        return self._end(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for blocks, chunks in zip(self._blocks, self._chunks, strict=True):
            blocks[torch.from_numpy(dst_spec.block_ids).long()] = chunks[torch.from_numpy(src_spec.block_ids).long()]
        return self._end(job_id)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Whatever was submitted is done."""

    def _end(self, job_id: int) -> bool:
        self._done.append(TransferResult(job_id, True))
        return True
