"""Shows the router's view of one worker's cache at `GET /kv?worker=ID` of the admin port, as a
msgpack map. All of the view is from one moment, so that it can be compared block for block with the
worker's own account.
"""

from __future__ import annotations

from dataclasses import asdict

import msgspec
import numpy as np
import numpy.typing as npt

from kvkernels import PrefixIndex
from router.core.workers.table import Worker

VERSION = 2
TIERS = ("gpu", "host", "disk")
MAX_VIEW_BYTES = 1 << 30  # most bytes that are read of a router's answer

Chains = npt.NDArray[np.uint64]


class TierView(msgspec.Struct, frozen=True):
    """The blocks that one worker holds in one tier: GPU, host memory or disk."""

    tier: str
    chains: bytes  # chain hashes of its blocks as little-endian uint64, each once, ascending
    indexed: int  # how many of these the index holds for the worker
    index_held: int  # blocks that the index holds for the worker, these or others


class KvView(msgspec.Struct, frozen=True):
    """The blocks that the router believes one worker holds, and how exact this belief is."""

    version: int
    worker: int
    url: str
    block_size: int  # tokens
    has_events: bool  # False: the router only estimates its cache
    known: bool  # no event is missing, or since then it has stored as much as it holds
    exact: bool  # no event is missing
    resyncing: bool  # missing events were asked for
    heard: bool  # events reach this router; False: the view is as old as the last one
    next_seq: int  # number of the batch that continues this
    backlog_batches: int  # batches that wait for missing ones before them
    parked_blocks: int  # blocks that wait for their parent
    index_evicted: int  # blocks of any worker that the index forgot at its bound
    counters: dict[str, int]
    tiers: list[TierView]

    @property
    def index_agrees(self) -> bool:
        """True if the index holds exactly these blocks for the worker, in every tier."""
        return all(t.indexed == t.index_held == len(t.chains) // 8 for t in self.tiers)

    def chains(self, tier: str = "gpu") -> Chains:
        """Return the chain hashes of the blocks in a tier, each once, ascending.

        The array is empty if the tier is not in the view.
        """
        held = [view.chains for view in self.tiers if view.tier == tier]
        return np.frombuffer(b"".join(held), dtype="<u8").astype(np.uint64)


class KvViewError(ValueError):
    """Raised for bytes that are not a `KvView`, or that are a `KvView` of another version."""


def kv_view(worker: Worker, index: PrefixIndex) -> KvView:
    """Return the present view of one worker."""
    kv = worker.kv
    tiers = []
    for tier, name in enumerate(TIERS):
        chains = np.unique(kv.chains(tier))
        indexed, held = index.contains(worker.slot, chains, tier), index.held(worker.slot, tier)
        if tier == 0 or len(chains) or held:
            tiers.append(TierView(name, chains.astype("<u8").tobytes(), indexed, held))
    return KvView(
        version=VERSION,
        worker=worker.worker_id,
        url=worker.facts.name,
        block_size=worker.facts.block_size,
        has_events=worker.has_usable_events,
        known=kv.known,
        exact=kv.exact,
        resyncing=kv.resyncing,
        heard=not kv.unheard,
        next_seq=kv.next_seq,
        backlog_batches=kv.backlog_batches,
        parked_blocks=kv.parked_blocks,
        index_evicted=index.evicted,
        counters=asdict(kv.counters),
        tiers=tiers,
    )


def encode_kv_view(view: KvView) -> bytes:
    """Return the view as the body of an answer. The body has at most 8 bytes a block, for at most
    `limits.index_entries` blocks.
    """
    return msgspec.msgpack.encode(view)


def decode_kv_view(body: bytes) -> KvView:
    """Return the view in the body of an answer. Raises KvViewError if the body is not a view."""
    try:
        view = msgspec.msgpack.decode(body, type=KvView)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise KvViewError(f"not a view of a worker's blocks: {error}") from error
    if view.version != VERSION:
        raise KvViewError(f"a view of version {view.version}; this program reads {VERSION}")
    if any(len(tier.chains) % 8 for tier in view.tiers):
        raise KvViewError("chain hashes that are not 8 bytes each")
    return view
