"""Turns a source's block ids into the chain hashes of an engine that has another block size."""

from __future__ import annotations

import numpy as np

from kvkernels import chain_hashes
from policies.contract import Hashes
from simulator.traces.job import Job, TraceError

# Odd, so that multiplying by them permutes the 64-bit words; SplitMix64's (Steele et al., 2014).
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
SECOND = np.uint64(0x94D049BB133111EB)
S32 = np.uint64(32)
PRIVATE_FROM = 1 << 63  # sources' small ids end below it
PRIVATE_BITS = 23  # more than the blocks of the longest prompt, one token each


class Chainer:
    """Computes the hashes of an engine's blocks of `engine_block` tokens from ids of `source_block`
    tokens.

    One size must divide the other, else `TraceError` is raised. If the sizes are equal, a hash is
    of an id and all ids before it. If the engine's blocks are smaller, each id gives k hashes; a
    partial block that the source lists serves as far as the prompt reaches. If the engine's blocks
    are larger, every k-th hash is taken. Equal prefixes get equal hashes and unequal prefixes do
    not (except by chance, 2^-64 a pair). This holds even if a source wrongly uses an id twice
    behind different prefixes, because an engine's cache takes a hash for a whole prefix.
    """

    def __init__(self, source_block: int, engine_block: int) -> None:
        if source_block < 1 or engine_block < 1:
            raise TraceError("block sizes: expected 1 token or more")
        if source_block % engine_block and engine_block % source_block:
            raise TraceError(
                f"block size {engine_block}: an id of this source stands for {source_block} "
                f"tokens; choose a block size that divides {source_block} or is a multiple of it"
            )
        self.source_block = source_block
        self.engine_block = engine_block
        self._split = max(1, source_block // engine_block)
        self._merge = max(1, engine_block // source_block)
        self._lanes: Hashes = np.arange(1, self._split + 1, dtype=np.uint64) * SECOND

    def chain(self, job: Job, serial: int) -> Hashes:
        """Return the hashes of the job's full blocks: the prompt's, then the answer's if known.

        The result is uint64 `[prompt_tokens // engine_block + known ones of the answer]`, first
        block first. Prompt blocks without an id in the source are private to the job with this
        `serial` (arrivals counted from 0).
        """
        full = job.prompt_tokens // self.engine_block
        if self._split > 1:
            named = self._split_ids(job)
        elif self._merge > 1 or len(job.answer_ids):
            named = prefix_names(self._merged_ids(job))[self._merge - 1 :: self._merge]
        else:
            named = prefix_names(job.ids[:full])
        if len(named) >= full:
            return named
        return np.concatenate((named, private_ids(serial, len(named), full)))

    def _merged_ids(self, job: Job) -> Hashes:
        """Return the ids of all of the job's engine blocks, which are not smaller than the
        source's.
        """
        full = job.prompt_tokens // self.source_block
        ids = job.ids[:full]
        if len(ids) == full and len(job.answer_ids):
            ids = np.concatenate((ids, job.answer_ids))
        blocks = (job.prompt_tokens + job.output_tokens) // self.engine_block
        return ids[: blocks * self._merge]

    def _split_ids(self, job: Job) -> Hashes:
        """Return the hashes of engine blocks that are smaller than the source's: `_split` hashes
        for each id of the job. If the answer is known, the block that prompt and answer share gets
        the hash that the next turn will use for it.
        """
        full, ids, tokens = job.prompt_tokens // self.source_block, job.ids, job.prompt_tokens
        if len(job.answer_ids) and len(ids) >= full:
            ids = np.concatenate((ids[:full], job.answer_ids))
            tokens += job.output_tokens
        lanes: Hashes = np.add.outer(prefix_names(ids), self._lanes).ravel()
        return light_mix(lanes[: tokens // self.engine_block])


def prefix_names(ids: Hashes) -> Hashes:
    """Return for each id the chain hash of it and all ids before it, as blocks that hold one id
    each.
    """
    return chain_hashes(ids.view(np.int32), 2)


def light_mix(ids: Hashes) -> Hashes:
    """Permute uint64 values in three operations; every bit of an id affects the low half."""
    mixed: Hashes = ids * GOLDEN
    mixed ^= mixed >> S32
    return mixed


def private_ids(serial: int, first: int, end: int) -> Hashes:
    """Return hashes of the blocks `first` to `end - 1` that only the job `serial` has."""
    start = PRIVATE_FROM + (serial << PRIVATE_BITS)
    return light_mix(np.arange(start + first, start + end, dtype=np.uint64))
