"""A host-memory store for vLLM's OffloadingConnector that copies no data, for servers on a CPU.

It runs in vLLM's processes. vLLM's own store needs a GPU to copy from. vLLM's scheduler still
decides what is kept, evicted, found and published; the answers are nonsense.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class CopiesNothing(OffloadingWorker):  # type: ignore[misc]
    """A worker that reports each transfer as done at once."""

    def __init__(self) -> None:
        self._done: list[int] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._done.append(job_id)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self.submit_store(job_id, src_spec, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return [TransferResult(job_id, True, 1, 1.0) for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        pass


class OffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's own manager of host memory with a worker that copies nothing."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        return CopiesNothing()
