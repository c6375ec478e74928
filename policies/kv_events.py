"""What an engine tells of its cache: blocks that came, blocks that went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from policies.contract import Hashes
from policies.record import record

Tier = Literal["gpu", "host", "disk"]
BlockNames = tuple[int | bytes, ...] | Hashes  # an array stands for the same numbers as ints


@record
class Stored:
    """Blocks became resident; `hashes` are the engine's own names of them.

    `chain`: our own chain hashes of these blocks, where the source knows them (replays and
    recordings); `tokens`, `seed` and `extras` are not read then and may be left empty. Names may
    be equal to chain hashes, and an array of names may be the array `chain` itself. Neither
    tokens nor a chain: blocks that are known already came to another tier.

    A hybrid model tells the blocks of each of its cache groups. Those of one group count: of the
    first that is told to be one of full attention, until then of group 0; None: there is one only.
    """

    hashes: BlockNames
    parent: int | bytes | None
    tokens: tuple[int, ...] | npt.NDArray[np.int32]
    block_size: int
    tier: Tier = "gpu"
    seed: int = 0  # chain seed of the LoRA adapter and salt the event names
    chain: Hashes | None = None
    extras: tuple[bytes, ...] = ()  # hashed after the tokens of each block (images); or none
    group: int | None = None
    full_attention: bool = False


@record
class Removed:
    """Blocks were evicted."""

    hashes: BlockNames
    tier: Tier = "gpu"
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole cache was reset."""


KvEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class KvCopied:
    """What a peer, another router, knows of a worker's cache, which replaces what we knew.

    The batch `next_seq` goes on from it. `blocks`: `WorkerBlocks.dump`.
    """

    now_s: float
    worker_id: int
    next_seq: int
    live_seq: int  # the highest number of this life of the publisher that came live; -1: none
    digest: int  # of the batch before `next_seq`; 0 where it is not known
    exact: bool  # no event is missing in it
    turned_over: bool  # as much was stored since one was missed as the worker holds
    blocks: bytes


@dataclass(frozen=True, slots=True)
class KvHeard:
    """A worker's events, which reach us through a peer, are heard; or are heard no more, and
    what is known is as of then.
    """

    now_s: float
    worker_id: int
    heard: bool
