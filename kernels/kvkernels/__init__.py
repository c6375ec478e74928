"""Native building blocks for prefix-aware routing.

Owns: chain hashes (XXH3-64 over token blocks), the index of which worker holds which block, the
decoding of KV events and the record of one worker's blocks, the estimated caches of workers without
KV events, the owners of prefixes, the arithmetic over a pool's columns, the reading of a
plain request's head and body for routing, the engine on virtual time, and the relay's thread.
Gives: `chain_hashes`, `chain_seed`, `PrefixIndex`, `EventBatch`, `WorkerBlocks`, `Mirror`,
`PrefixOwners`, `plain_head`, `scan_request`, `body_fields`, `drain_queues`, `missing_tokens` and
other functions over columns. `VirtualWorker` is the engine on virtual time. `Relay`, a
thread that carries requests and replies, is None where there is no Linux: the router relays in
Python there.
Without a native build that fits, importing this package raises an ImportError that names the
command that makes one.
Never imports: anything else of this project. Torch is imported by `kvkernels.ops` alone, which
this face leaves alone.
Start reading at: `_native.pyi`; `tests/oracles` states what `kernels/src/` does in Python.
"""

import msgspec
import xxhash

try:
    from kvkernels._native import (
        AnswerDue,
        AnswerJudge,
        EventBatch,
        FrozenBlocks,
        HybridWorkers,
        Mirror,
        PlainHead,
        PrefixIndex,
        PrefixOwners,
        PromptText,
        SessionWeights,
        Trunk,
        Trunks,
        VirtualWorker,
        WarmsetCosts,
        WorkerBlocks,
        body_fields,
        chain_hashes,
        cheapest,
        drain_queues,
        hit_tokens,
        json_items,
        json_text,
        late_failure,
        leading,
        load_tokens,
        media_chain_hashes,
        median_product,
        missing_tokens,
        plain_head,
        reply_head,
        scan_request,
        sum_of,
        sum_of_least,
        token_ids,
        wide_chain_hashes,
    )
except ImportError as error:
    raise ImportError(
        f"the native build of kvkernels is missing or does not fit ({error}); make it with "
        "`pip install -e .` in a checkout, `pip install --force-reinstall warmroute` elsewhere",
        name=__name__,
    ) from error

try:
    from kvkernels._native import (
        Relay,
        RelayEnd,
        RelayJournal,
        RelayJournalTerms,
        RelayPool,
        RelayReply,
        RelayRoom,
        RelayTimeouts,
    )
except ImportError:  # no Linux: the router relays in Python
    Relay = RelayEnd = RelayPool = None  # type: ignore[assignment,misc]
    RelayReply = RelayTimeouts = None  # type: ignore[assignment,misc]
    RelayJournal = RelayJournalTerms = RelayRoom = None  # type: ignore[assignment,misc]

__all__ = [
    "AnswerDue",
    "AnswerJudge",
    "EventBatch",
    "FrozenBlocks",
    "HybridWorkers",
    "Mirror",
    "PlainHead",
    "PrefixIndex",
    "PrefixOwners",
    "PromptText",
    "Relay",
    "RelayEnd",
    "RelayJournal",
    "RelayJournalTerms",
    "RelayPool",
    "RelayReply",
    "RelayRoom",
    "RelayTimeouts",
    "SessionWeights",
    "Trunk",
    "Trunks",
    "VirtualWorker",
    "WarmsetCosts",
    "WorkerBlocks",
    "body_fields",
    "chain_hashes",
    "chain_seed",
    "cheapest",
    "drain_queues",
    "hit_tokens",
    "json_items",
    "json_text",
    "late_failure",
    "leading",
    "load_tokens",
    "media_chain_hashes",
    "median_product",
    "missing_tokens",
    "plain_head",
    "reply_head",
    "scan_request",
    "sum_of",
    "sum_of_least",
    "token_ids",
    "wide_chain_hashes",
]


def chain_seed(model: str, lora: str | None = None, salt: str | None = None) -> int:
    """Return the uint64 seed of `chain_hashes` for a request, so that requests with different
    adapters or salts share no block. It is 0 for a base model without salt, else XXH3-64 of the
    msgpack array [model, lora or nil, salt or nil] in its shortest encoding (docs/structure.md,
    block identity).
    """
    if not lora and not salt:
        return 0
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode([model, lora or None, salt or None]))
