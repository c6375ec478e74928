"""Native building blocks for prefix-aware routing.

Owns: chain hashes (XXH3-64 over token blocks), the index of which worker holds which block, the
decoding of KV events and what they say of one worker, the mirror of workers that tell nothing, who
uses which blocks, the arithmetic over a pool's columns, and the twin of the engine on virtual time.
Gives: `chain_hashes`, `PrefixIndex`, `EventBatch`, `WorkerBlocks`, `Mirror`, `PrefixOwners`,
`drain_queues`, `missing_tokens`; `NATIVE` says whether the C++ build or the plain-Python twins
(same answers, slower) are in use; `UNUSABLE` why a build that is there is not, empty else:
`native_build.warn` tells it. `VirtualWorker` is None without the C++ build: its plain twin is
`engine.virtual.VirtualWorker`, which drives the real scheduler.
Never imports: anything else of this project, torch.
Start reading at: `twins.py`, which states in Python what the C++ in `kernels/src/` does fast.
"""

try:
    from kvkernels._native import (
        EventBatch,
        FrozenBlocks,
        Mirror,
        PrefixIndex,
        PrefixOwners,
        VirtualWorker,
        WorkerBlocks,
        chain_hashes,
        drain_queues,
        missing_tokens,
    )

    NATIVE, UNUSABLE = True, ""
except ImportError as error:  # no compiler at install time: the twins answer the same
    from kvkernels.blocks_file_twin import FrozenBlocks  # type: ignore[assignment]
    from kvkernels.column_twins import drain_queues, missing_tokens
    from kvkernels.event_twins import EventBatch, WorkerBlocks  # type: ignore[assignment]
    from kvkernels.mirror_twin import Mirror  # type: ignore[assignment]
    from kvkernels.prefix_owners_twin import PrefixOwners  # type: ignore[assignment]
    from kvkernels.twins import PrefixIndex, chain_hashes  # type: ignore[assignment]

    VirtualWorker = None  # type: ignore[assignment,misc]
    NATIVE = False
    UNUSABLE = "" if isinstance(error, ModuleNotFoundError) else str(error)

__all__ = [
    "NATIVE",
    "UNUSABLE",
    "EventBatch",
    "FrozenBlocks",
    "Mirror",
    "PrefixIndex",
    "PrefixOwners",
    "VirtualWorker",
    "WorkerBlocks",
    "chain_hashes",
    "drain_queues",
    "missing_tokens",
]
