"""Native building blocks for prefix-aware routing.

Owns: chain hashes (XXH3-64 over token blocks), the index of which worker holds which block, the
decoding of KV events and what they say of one worker, the mirror of workers that tell nothing, who
uses which blocks, the arithmetic over a pool's columns, what routing needs of a plain request's
head and body, the twin of the engine on virtual time, and the relay's thread.
Gives: `chain_hashes`, `PrefixIndex`, `EventBatch`, `WorkerBlocks`, `Mirror`, `PrefixOwners`,
`plain_head`, `scan_request`, `drain_queues`, `missing_tokens` and what else a decision asks of
columns (see `column_twins.py`); `NATIVE` says whether the C++ build or the plain-Python twins (same
answers, slower) are in use; `UNUSABLE` why a build that is there is not, empty else:
`native_build.warn` tells it. `VirtualWorker` is None without the C++ build: its plain twin is
`engine.virtual.VirtualWorker`, which drives the real scheduler. `Relay`, a thread that carries
requests and replies, is None without the C++ build or Linux: its twin is `router.http.relay`.
Never imports: anything else of this project. Torch is imported by `kvkernels.ops` alone, which
this face leaves alone.
Start reading at: `twins.py`, which states in Python what the C++ in `kernels/src/` does fast.
"""

from kvkernels.head_twin import PlainHead
from kvkernels.request_twin import PromptText

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
        cheapest,
        drain_queues,
        hit_tokens,
        load_tokens,
        median_product,
        missing_tokens,
        plain_head,
        scan_request,
    )

    NATIVE, UNUSABLE = True, ""
except ImportError as error:  # no compiler at install time: the twins answer the same
    from kvkernels.blocks_file_twin import FrozenBlocks  # type: ignore[assignment]
    from kvkernels.column_twins import (
        cheapest,
        drain_queues,
        hit_tokens,
        load_tokens,
        median_product,
        missing_tokens,
    )
    from kvkernels.event_twins import EventBatch, WorkerBlocks  # type: ignore[assignment]
    from kvkernels.head_twin import plain_head  # type: ignore[assignment]
    from kvkernels.mirror_twin import Mirror  # type: ignore[assignment]
    from kvkernels.prefix_owners_twin import PrefixOwners  # type: ignore[assignment]
    from kvkernels.request_twin import scan_request  # type: ignore[assignment]
    from kvkernels.twins import PrefixIndex, chain_hashes  # type: ignore[assignment]

    VirtualWorker = None  # type: ignore[assignment,misc]
    NATIVE = False
    UNUSABLE = "" if isinstance(error, ModuleNotFoundError) else str(error)

try:
    from kvkernels._native import (
        Relay,
        RelayEnd,
        RelayGathering,
        RelayJournal,
        RelayJournalTerms,
        RelayPool,
        RelayReply,
        RelayRoom,
        RelayTimeouts,
    )
except ImportError:  # not built, or no Linux: the router relays in Python
    Relay = RelayEnd = RelayPool = None  # type: ignore[assignment,misc]
    RelayGathering = RelayReply = RelayTimeouts = None  # type: ignore[assignment,misc]
    RelayJournal = RelayJournalTerms = RelayRoom = None  # type: ignore[assignment,misc]

__all__ = [
    "NATIVE",
    "UNUSABLE",
    "EventBatch",
    "FrozenBlocks",
    "Mirror",
    "PlainHead",
    "PrefixIndex",
    "PrefixOwners",
    "PromptText",
    "Relay",
    "RelayEnd",
    "RelayGathering",
    "RelayJournal",
    "RelayJournalTerms",
    "RelayPool",
    "RelayReply",
    "RelayRoom",
    "RelayTimeouts",
    "VirtualWorker",
    "WorkerBlocks",
    "chain_hashes",
    "cheapest",
    "drain_queues",
    "hit_tokens",
    "load_tokens",
    "median_product",
    "missing_tokens",
    "plain_head",
    "scan_request",
]
