"""Estimates which blocks workers have cached beyond what their KV events report correctly.
`ExpectedBlocks` has the blocks that workers with KV events will soon store because of this router's
dispatches. `Mirrors` has the estimated caches of workers without usable KV events. `HitConfidence`
has for each worker the share of the blocks reported by KV events that the worker really has. The
`cached_tokens` in answers correct the last two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvkernels import Mirror, PrefixIndex, chain_hashes
from policies.contract import Floats, Hashes
from policies.facts import Arrival, Finish

Blocks = npt.NDArray[np.int32]


@dataclass(eq=False, slots=True)
class Expectation:
    """The prompt blocks that one dispatch will leave in its worker's cache.

    Lifetime: dispatch.
    """

    slot: int
    chain: Hashes


class ExpectedBlocks:
    """The blocks that workers will soon have cached, because of this router's recent dispatches.

    A block is expected for `ttl_s` / 2 to `ttl_s` seconds. It is dropped earlier if its worker
    reports it as removed, or if its dispatch fails and no other unfinished dispatch contains it.
    Blocks are stored in two generations, and the older one is dropped as a whole. So expiry costs
    nothing per block, and a dispatch is one native call whatever the length of its prompt.
    Lifetime: process.
    """

    def __init__(self, slots: int, max_entries: int, ttl_s: float) -> None:
        self._slots = slots
        self._max_entries = max_entries
        self._half_s = ttl_s / 2
        self._young = PrefixIndex(slots, max_entries=max_entries)
        self._old = PrefixIndex(slots, max_entries=max_entries)
        self._turned_s = float("-inf")
        # True if anything was ever stored: without workers with events both stay empty.
        self._has_young = self._has_old = False
        self._open: dict[int, set[Expectation]] = {}  # by slot: of dispatches that have not ended

    def expect(self, slot: int, chain: Hashes, now_s: float) -> Expectation:
        """Record that the worker in `slot` will soon have cached the blocks of `chain`.

        The caller must pass the result to `ended` when the dispatch ends.
        """
        self.expire(now_s)
        self._young.store(slot, chain)
        self._has_young = True
        expectation = Expectation(slot, chain)
        self._open.setdefault(slot, set()).add(expectation)
        return expectation

    def ended(self, expectation: Expectation, failed: bool) -> None:
        """Record that the dispatch of `expectation` has ended. `failed` is True if the prompt was
        never computed. In this case drop its blocks, except those that the prompts of other
        unfinished dispatches to this worker contain.
        """
        slot, chain = expectation.slot, expectation.chain
        others = self._open.get(slot)
        if others is None or expectation not in others:  # its cache was emptied or lost meanwhile
            return
        others.discard(expectation)
        if not failed:
            return
        shared = 0
        for other in others:
            if shared < min(len(other.chain), len(chain)) and other.chain[shared] == chain[shared]:
                shared = _shared_blocks(other.chain, chain)
        self.drop(slot, chain[shared:])

    def drop(self, slot: int, hashes: Hashes) -> None:
        """Drop expected blocks, because the worker in `slot` does not have them cached."""
        if self._has_young:
            self._young.remove(slot, hashes)
        if self._has_old:
            self._old.remove(slot, hashes)

    def raise_prefix(self, blocks: Blocks, chain: Hashes) -> None:
        """Raise each worker's number of cached leading blocks to the number that is expected there.
        `blocks` has the numbers by worker slot, int32[slots], and is changed in place. `chain` has
        the chain hashes of the prompt.
        """
        if self._has_young:
            self._young.raise_prefix(chain, blocks)
        if self._has_old:
            self._old.raise_prefix(chain, blocks)

    def clear_worker(self, slot: int) -> None:
        """Drop all expected blocks of the worker in `slot`."""
        self._open.pop(slot, None)
        self._young.clear_worker(slot)
        self._old.clear_worker(slot)

    def expire(self, now_s: float) -> None:
        """Drop expected blocks that are too old.

        The core calls this method at each tick and at each dispatch.
        """
        if now_s - self._turned_s < self._half_s:
            return
        if now_s - self._turned_s >= 2 * self._half_s:  # both generations have outlived it
            self._young = PrefixIndex(self._slots, max_entries=self._max_entries)
            self._has_young = False
        self._old, self._has_old = self._young, self._has_young
        self._young = PrefixIndex(self._slots, max_entries=self._max_entries)
        self._has_young = False
        self._turned_s = now_s

    def __len__(self) -> int:
        return len(self._young) + len(self._old)


def _shared_blocks(one: Hashes, other: Hashes) -> int:
    """Return how many leading blocks two prompts have in common.

    A chain hash stands for its block and all blocks before it, so equal hashes mean equal prefixes.
    """
    most = min(len(one), len(other))
    same = one[:most] == other[:most]
    return most if same.all() else int(np.argmin(same))


# Assumed capacity of a worker that reports none: 262,144 tokens in blocks of 16.
BLOCKS_UNTOLD = 16_384

_SHRINK = 0.5  # share of the way down to the proven capacity
_REGROW = 1 / 64  # of a block, for each that is stored, up to the reported capacity
_REMEMBERED = 2  # blocks remembered for each block of the reported capacity


@dataclass(slots=True)
class _Room:
    """The assumed capacity of a worker's estimated cache, in blocks.

    Lifetime: until the worker's cache is emptied or lost.
    """

    told_blocks: float
    blocks: float  # as corrected
    corrected: bool = False  # by an answer that proved blocks gone
    most_blocks: int = 0  # largest possible size, limited by the share of all mirrors
    running: set[int] = field(default_factory=set)  # touches of requests that have not ended


@dataclass(slots=True)
class Prediction:
    """The prompt blocks that a worker with an estimated cache should find cached for one dispatch.

    Lifetime: dispatch.
    """

    slot: int
    chain: Hashes
    stamp: int  # of the mirror's touch
    hit_blocks: int
    runs: list[tuple[int, int]]  # (depth, when last used before; 0: unseen, or still in the making)
    room: _Room


@dataclass(frozen=True, slots=True)
class Found:
    """The count of leading prompt blocks that the worker had cached, according to its answer.

    The true number may be up to `slack` blocks higher.
    """

    blocks: int
    slack: int


@dataclass(slots=True)
class MirrorCounters:
    """Counts answers that proved the estimate of a worker's cache wrong.

    Lifetime: process.
    """

    fewer: int = 0  # answers that proved blocks gone which counted as cached
    more: int = 0  # answers that proved blocks cached which counted as gone


class Mirrors:
    """Estimates the caches of workers whose KV events cannot be used or do not exist.

    The estimate of one worker's cache, its mirror, comes from this router's dispatches and is
    corrected by answers. All mirrors together remember at most `max_blocks` blocks.
    Lifetime: process.
    """

    def __init__(self, slots: int, max_blocks: int) -> None:
        self.counters = MirrorCounters()
        self._mirror = Mirror(slots, max_blocks)
        self._max_blocks = max_blocks
        self._share = max_blocks
        self._rooms: dict[int, _Room] = {}

    def expect(self, slot: int, chain: Hashes, told_blocks: float) -> Prediction:
        """Add a dispatched prompt to a worker's estimated cache, and return the expected hits.

        The prompt's blocks count as cached from now on, so that later prompts can count them as
        hits. `told_blocks` is how many blocks the worker says it holds, or NaN.
        """
        room = self._rooms.get(slot) or self._open(slot, told_blocks)
        hit_blocks, stamp, runs = self._mirror.touch(slot, chain)
        # Blocks that a running request has yet to compute may be missing without having been
        # evicted.
        runs = [(end, 0 if used in room.running else used) for end, used in runs]
        prediction = Prediction(slot, chain, stamp, hit_blocks, runs, room)
        room.running.add(stamp)
        if room.blocks < room.told_blocks:
            came = len(chain) - hit_blocks
            self._resize(slot, room, min(room.blocks + came * _REGROW, room.told_blocks))
        return prediction

    def answered(self, prediction: Prediction, found: Found | None, answer_blocks: int = 0) -> None:
        """Correct the estimate of a worker's cache by the answer to a prompt. `found` is the number
        of prompt blocks that the worker had cached, according to its answer, or None.
        `answer_blocks` is the number of full blocks that the answer itself added to the cache.
        """
        room, slot, chain = prediction.room, prediction.slot, prediction.chain
        room.running.discard(prediction.stamp)
        if room is not self._rooms.get(slot):  # its cache was emptied or lost meanwhile
            return
        if found is not None:
            self._correct(prediction, found)
        if answer_blocks > 0:  # not beyond the cache's size, whatever the answer claims
            names = _names(prediction.stamp, min(answer_blocks, room.most_blocks))
            chain = np.concatenate((chain, names))
        self._mirror.touch(slot, chain)  # an engine's order: as requests let go

    def failed(self, prediction: Prediction) -> None:
        """Remove the blocks that only a failed dispatch would have stored from a worker's estimated
        cache.
        """
        room = prediction.room
        room.running.discard(prediction.stamp)
        if room is self._rooms.get(prediction.slot):
            new = prediction.chain[prediction.hit_blocks :]
            self._mirror.forget(prediction.slot, new, prediction.stamp)

    def raise_prefix(self, blocks: Blocks, chain: Hashes) -> None:
        """Raise each worker's number of cached leading blocks to the number in its estimated cache.
        `blocks` has the numbers by worker slot, int32[slots], and is changed in place. `chain` has
        the chain hashes of the prompt.
        """
        if self._rooms:  # else every worker has events, and the mirror is empty
            self._mirror.raise_prefix(chain, blocks)

    def clear_worker(self, slot: int) -> None:
        """Drop the estimated cache of a worker that left or whose cache was emptied or lost."""
        if self._rooms.pop(slot, None) is not None:
            self._mirror.clear_worker(slot)
            self._mirror.resize(slot, 0, 0)
            self._divide()

    def room_blocks(self, slot: int) -> float:
        """Return how many blocks a worker's cache is assumed to hold.

        NaN means that the worker's cache is not estimated.
        """
        room = self._rooms.get(slot)
        return math.nan if room is None else room.blocks

    def learned_blocks(self, slot: int) -> float:
        """Return how many blocks a worker's cache holds, as learned from its answers.

        NaN means that no answer has proved an eviction yet.
        """
        room = self._rooms.get(slot)
        return math.nan if room is None or not room.corrected else room.blocks

    def __len__(self) -> int:
        """Return the number of different blocks in all estimated caches together."""
        return len(self._mirror)

    @property
    def memory_bytes(self) -> int:
        """The memory that all estimated caches use, in bytes."""
        return self._mirror.memory_bytes

    def _correct(self, prediction: Prediction, found: Found) -> None:
        slot, room, expected = prediction.slot, prediction.room, prediction.hit_blocks
        if found.blocks + found.slack < expected:
            used = _used(prediction, found.blocks)
            if not used:
                return
            self.counters.fewer += 1
            room.corrected = True
            self._mirror.drop_colder(slot, used)
            # Not fewer than it held when it looked; blocks stored since then count as well.
            excess = room.blocks - max(self._mirror.held(slot), len(prediction.chain))
            self._resize(slot, room, room.blocks - max(excess, 0) * _SHRINK)
        elif found.blocks > expected and (used := _used(prediction, found.blocks - 1)):
            self.counters.more += 1
            self._mirror.resize(slot, room.most_blocks, self._remembered(room))
            self._mirror.revive_warmer(slot, used)
            self._resize(slot, room, max(room.blocks, self._mirror.held(slot)))

    def _open(self, slot: int, told_blocks: float) -> _Room:
        told_blocks = told_blocks if math.isfinite(told_blocks) else BLOCKS_UNTOLD
        room = self._rooms[slot] = _Room(told_blocks, told_blocks)
        self._divide()
        self._resize(slot, room, room.blocks)
        return room

    def _divide(self) -> None:
        """Limit each worker's estimated cache to an equal share of `max_blocks` blocks.

        The share is `max_blocks` divided by a power of two, so that it seldom changes.
        """
        share = max(self._max_blocks >> max(len(self._rooms) - 1, 0).bit_length(), 1)
        if share == self._share:
            return
        self._share = share
        for slot, room in self._rooms.items():
            if room.most_blocks:  # else it is being opened
                self._resize(slot, room, room.blocks)

    def _remembered(self, room: _Room) -> int:
        return max(min(int(room.told_blocks * _REMEMBERED), self._share), 1)

    def _resize(self, slot: int, room: _Room, blocks: float) -> None:
        room.most_blocks = remembered = self._remembered(room)
        room.blocks = min(max(blocks, 1.0), remembered)
        self._mirror.resize(slot, int(room.blocks), remembered)


def _used(prediction: Prediction, depth: int) -> int:
    """Return when a prompt block was last used before this dispatch, counted in uses of the
    worker's estimated cache. `depth` is the block's place in the prompt. 0 means that the block's
    absence proves no eviction, because the block was never used before or is still being computed.
    """
    return next((used for end, used in prediction.runs if depth < end), 0)


def found_by(arrival: Arrival, finish: Finish, block_size: int, chain: Hashes) -> Found | None:
    """Return how many prompt blocks were cached according to an answer, or None if the answer does
    not say. The blocks of a text prompt are guessed at four bytes per token, and the engine's chat
    template adds tokens. So the engine's cached share of prompt tokens is applied to the guessed
    blocks, with a slack of an eighth. For a prompt of token ids the slack is one block, because an
    engine computes at least one token again, and with speculative decoding the last full block. If
    a request has several prompts, the answer reports only their sum, so the result is None.
    """
    cached, longest = finish.cached_tokens, arrival.longest_prompt_tokens
    if cached is None or longest not in (None, arrival.prompt_tokens):
        return None
    if not arrival.approximate:
        return Found(min(cached // block_size, len(chain)), 1)
    if not finish.prompt_tokens:
        return None
    share = min(cached / finish.prompt_tokens, 1.0)
    return Found(round(share * len(chain)), 1 + len(chain) // 8)


@dataclass(slots=True)
class EventHits:
    """The prompt blocks that a worker should find cached for one dispatch, by its KV events.

    Lifetime: dispatch.
    """

    worker_id: int
    chain: Hashes
    blocks: int  # leading blocks; at least 2, because an answer may find one fewer in any case
    life: int  # `HitConfidence.life` of the worker at the dispatch
    removed_blocks: int  # all that its events had ever removed until the dispatch
    alone: bool  # no other request waited at the worker, so it looked the prompt up at once

    def kept_blocks(self, removed_blocks: int) -> int:
        """Return how many of these blocks were surely still cached when the worker looked for them.
        Requests that the worker computed before may have evicted blocks. `removed_blocks` is the
        number of blocks that the worker's KV events have ever reported as removed.
        """
        gone = 0 if self.alone else removed_blocks - self.removed_blocks
        return max(self.blocks - gone, 0)


ANSWERS = 16  # that looked for blocks known by events, before a worker's hits are discounted
_ANSWERS_AGAIN = 4  # the same for a worker that was discounted before its cache was emptied or lost
_FADE = 1 - 1 / ANSWERS  # an answer's weight, for each later answer
_DOUBTED, _BELIEVED = 0.5, 0.75  # confirmed share below, and from which on


@dataclass(slots=True)
class _Confirmed:
    """The mean share of the blocks promised by a worker's KV events that its answers found.

    Lifetime: until the worker's cache is emptied or lost.
    """

    answers: int = 0
    weight: float = 0.0
    found: float = 0.0
    doubted: bool = False
    doubted_before: bool = False

    @property
    def share(self) -> float:
        return self.found / self.weight

    @property
    def enough(self) -> bool:
        return self.answers >= (_ANSWERS_AGAIN if self.doubted_before else ANSWERS)


class HitConfidence:
    """Decides how far the router trusts the cache hits that each worker's KV events promise, 0..1.

    The confidence of a worker is 1 until its answers find less than half of the promised blocks on
    average. Then it is this average, until the average reaches three quarters. Recent answers weigh
    most. The first judgement needs `ANSWERS` answers, or `_ANSWERS_AGAIN` if the worker was
    distrusted before its cache was last emptied. If a worker's answers do not report cached tokens,
    its confidence stays 1.
    Lifetime: process.
    """

    def __init__(self, confidence: Floats) -> None:
        """Keep each worker's confidence in `confidence`, float64[slots].

        The array must be 1 in all slots at the start.
        """
        self._confidence = confidence
        self._confirmed: dict[int, _Confirmed] = {}
        self._lives = [0] * len(confidence)
        self.discounted = 0  # workers

    def life(self, slot: int) -> int:
        """Return a number that changes whenever the record of a worker's cache is started again. An
        answer is compared only with what KV events promised under the same number.
        """
        return self._lives[slot]

    def answered(self, slot: int, expected: int, found: Found) -> bool:
        """Count an answer, and update the confidence in the worker's KV events. `expected` is the
        number of prompt blocks that the events promised as cached, and `found` what the answer
        reports. Return True if the worker's hits count less from now on, or count in full again.
        """
        known = self._confirmed.setdefault(slot, _Confirmed())
        share = 1.0 if found.blocks + found.slack >= expected else found.blocks / expected
        known.answers += 1
        known.weight = known.weight * _FADE + 1.0
        known.found = known.found * _FADE + share
        before = known.doubted
        if not before:
            known.doubted = known.enough and known.share < _DOUBTED
        elif known.share >= _BELIEVED:
            known.doubted = known.doubted_before = False
        self.discounted += known.doubted - before
        self._confidence[slot] = known.share if known.doubted else 1.0
        return known.doubted != before

    def reset(self, slot: int) -> None:
        """Reset a worker's confidence to 1, because the record of its cache is started again. A
        worker that was distrusted is judged again after fewer answers.
        """
        self._lives[slot] += 1
        known = self._confirmed.pop(slot, None)
        if known is None:
            return
        if known.doubted or (known.doubted_before and not known.enough):
            self._confirmed[slot] = _Confirmed(doubted_before=True)
        self.discounted -= known.doubted
        self._confidence[slot] = 1.0

    def forget(self, slot: int) -> None:
        """Remove all data about the worker in `slot`, because it left."""
        self.reset(slot)
        self._confirmed.pop(slot, None)


def _names(stamp: int, count: int) -> Hashes:
    """Return `count` unique hashes that stand for the blocks of an answer whose tokens are unknown.
    `stamp` must be different for each answer.
    """
    return chain_hashes(np.zeros(count, dtype=np.int32), 1, stamp)


def answer_blocks(arrival: Arrival, finish: Finish, block_size: int) -> int:
    """Return how many full blocks the tokens of an answer added to the worker's cache.

    An engine does not cache the last token of an answer.
    """
    kept_tokens = max((finish.output_tokens or 0) - 1, 0)
    prompt_tokens = finish.prompt_tokens or arrival.prompt_tokens
    return (prompt_tokens + kept_tokens) // block_size - prompt_tokens // block_size
