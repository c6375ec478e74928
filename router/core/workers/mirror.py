"""Estimates of the blocks in workers' caches that KV events do not report, or report wrongly.

`ExpectedBlocks` are the blocks that this router's dispatches will soon store. `Mirrors` are
estimated caches of workers without KV events. `HitConfidence` is the share of the blocks reported
by KV events that are really there. Answers that report `cached_tokens` correct the mirrors
(`Mirrors.answered`) and the confidence (`HitConfidence.answered`).
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
    """The blocks that one dispatch will leave in its worker's cache.

    Lifetime: dispatch.
    """

    slot: int
    chain: Hashes


class ExpectedBlocks:
    """The blocks that this router's dispatches will soon leave in workers' caches.

    A block is expected for at least `ttl_s` / 2 and at most `ttl_s` seconds. It is dropped earlier
    if its worker reports it as removed, or if its dispatch fails and no other dispatch brings it.
    An index of two generations holds the blocks. Expiry drops a whole generation, which costs
    nothing per block. So a dispatch is one native call for a prompt of any length. Lifetime:
    process.
    """

    def __init__(self, slots: int, max_entries: int, ttl_s: float) -> None:
        self._slots = slots
        self._max_entries = max_entries
        self._half_s = ttl_s / 2
        self._young = PrefixIndex(slots, max_entries=max_entries)
        self._old = PrefixIndex(slots, max_entries=max_entries)
        self._turned_s = float("-inf")
        # Whether anything was ever put there: where no worker's events tell, nothing is.
        self._has_young = self._has_old = False
        self._open: dict[int, set[Expectation]] = {}  # by slot: of dispatches that have not ended

    def expect(self, slot: int, chain: Hashes, now_s: float) -> Expectation:
        """Expect the blocks of `chain` in the cache of the worker in `slot`.

        The caller passes the result to `ended` at the end of the dispatch.
        """
        self.expire(now_s)
        self._young.store(slot, chain)
        self._has_young = True
        expectation = Expectation(slot, chain)
        self._open.setdefault(slot, set()).add(expectation)
        return expectation

    def ended(self, expectation: Expectation, failed: bool) -> None:
        """End the expectation of a dispatch.

        If the dispatch `failed`, its prompt was never computed. Then only those of its blocks are
        still expected that other open dispatches bring.
        """
        slot, chain = expectation.slot, expectation.chain
        others = self._open.get(slot)
        if others is None or expectation not in others:  # its cache began anew meanwhile
            return
        others.discard(expectation)
        if not failed:
            return
        shared = 0
        for other in others:
            if shared < min(len(other.chain), len(chain)) and other.chain[shared] == chain[shared]:
                shared = _shared_blocks(other.chain, chain)
        self.gone(slot, chain[shared:])

    def gone(self, slot: int, hashes: Hashes) -> None:
        """Stop expecting blocks that the worker in `slot` does not hold."""
        if self._has_young:
            self._young.remove(slot, hashes)
        if self._has_old:
            self._old.remove(slot, hashes)

    def raise_prefix(self, blocks: Blocks, chain: Hashes) -> None:
        """Raise `blocks`, int32[slots], to the number of leading blocks expected on each worker."""
        if self._has_young:
            self._young.raise_prefix(chain, blocks)
        if self._has_old:
            self._old.raise_prefix(chain, blocks)

    def clear_worker(self, slot: int) -> None:
        """Forget all blocks expected on the worker in `slot`."""
        self._open.pop(slot, None)
        self._young.clear_worker(slot)
        self._old.clear_worker(slot)

    def expire(self, now_s: float) -> None:
        """Forget blocks that are too old.

        The core calls this method at every tick and dispatch.
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
    """Return the number of leading blocks that two chains share.

    A chain hash covers all blocks before it, so equal hashes mean equal prefixes.
    """
    most = min(len(one), len(other))
    same = one[:most] == other[:most]
    return most if same.all() else int(np.argmin(same))


BLOCKS_UNTOLD = 16_384  # room of a worker that does not tell: 262,144 tokens in blocks of 16

_SHRINK = 0.5  # of the way down to what was proven
_REGROW = 1 / 64  # of a block, for each that comes in, up to what was told
_REMEMBERED = 2  # blocks remembered for each that the worker told to have room for


@dataclass(slots=True)
class _Room:
    """The number of blocks that a worker's cache is assumed to hold.

    Lifetime: until the cache begins anew.
    """

    told_blocks: float
    blocks: float  # as corrected
    corrected: bool = False  # by an answer that proved blocks gone
    most_blocks: int = 0  # it may ever be, bounded by what all mirrors share
    running: set[int] = field(default_factory=set)  # touches of requests that have not ended


@dataclass(slots=True)
class Prediction:
    """The cached blocks that a worker was expected to find for a dispatched prompt.

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
    """The number of leading prompt blocks that were cached, according to the worker's answer.

    The true number may be up to `slack` blocks higher.
    """

    blocks: int
    slack: int


@dataclass(slots=True)
class MirrorCounters:
    """Counts of answers that proved a mirror wrong, which only grow.

    Lifetime: process.
    """

    fewer: int = 0  # answers that proved blocks gone which were believed resident
    more: int = 0  # answers that proved blocks resident which were believed gone


class Mirrors:
    """The estimated caches of workers whose KV events do not report them.

    The estimates come from this router's dispatches and from answers. All mirrors together remember
    at most `max_blocks` blocks. Lifetime: process.
    """

    def __init__(self, slots: int, max_blocks: int) -> None:
        self.counters = MirrorCounters()
        self._mirror = Mirror(slots, max_blocks)
        self._max_blocks = max_blocks
        self._share = max_blocks
        self._rooms: dict[int, _Room] = {}

    def expect(self, slot: int, chain: Hashes, told_blocks: float) -> Prediction:
        """Add a dispatched chain to a worker's mirror, and return the blocks that it should find.

        `told_blocks` is the capacity in blocks that the worker reported, or NaN. The chain counts
        as cached from now on, so that later prompts with the same prefix count it as hits.
        """
        room = self._rooms.get(slot) or self._open(slot, told_blocks)
        hit_blocks, stamp, runs = self._mirror.touch(slot, chain)
        # What a running request has yet to compute may be missing without having been evicted.
        runs = [(end, 0 if used in room.running else used) for end, used in runs]
        prediction = Prediction(slot, chain, stamp, hit_blocks, runs, room)
        room.running.add(stamp)
        if room.blocks < room.told_blocks:
            came = len(chain) - hit_blocks
            self._resize(slot, room, min(room.blocks + came * _REGROW, room.told_blocks))
        return prediction

    def answered(self, prediction: Prediction, found: Found | None, answer_blocks: int = 0) -> None:
        """Correct a worker's mirror by its answer to a computed prompt.

        `found` is the number of cached blocks that the answer reported, or None. `answer_blocks` is
        the number of full blocks that the answer added after those of the prompt.
        """
        room, slot, chain = prediction.room, prediction.slot, prediction.chain
        room.running.discard(prediction.stamp)
        if room is not self._rooms.get(slot):  # its cache began anew meanwhile
            return
        if found is not None:
            self._correct(prediction, found)
        if answer_blocks > 0:  # not beyond the cache, whatever the answer claims
            names = _names(prediction.stamp, min(answer_blocks, room.most_blocks))
            chain = np.concatenate((chain, names))
        self._mirror.touch(slot, chain)  # an engine's order: as requests let go

    def failed(self, prediction: Prediction) -> None:
        """Forget blocks that only a failed dispatch would have brought to its worker."""
        room = prediction.room
        room.running.discard(prediction.stamp)
        if room is self._rooms.get(prediction.slot):
            new = prediction.chain[prediction.hit_blocks :]
            self._mirror.forget(prediction.slot, new, prediction.stamp)

    def raise_prefix(self, blocks: Blocks, chain: Hashes) -> None:
        """Raise `blocks`, int32[slots], to the number of leading blocks mirrored on each worker."""
        if self._rooms:  # else every worker tells: the mirror is empty
            self._mirror.raise_prefix(chain, blocks)

    def clear_worker(self, slot: int) -> None:
        """Forget the mirror of a worker that left, or whose cache began anew."""
        if self._rooms.pop(slot, None) is not None:
            self._mirror.clear_worker(slot)
            self._mirror.resize(slot, 0, 0)
            self._divide()

    def room_blocks(self, slot: int) -> float:
        """Return the number of blocks that a worker is assumed to hold, or NaN without a mirror."""
        room = self._rooms.get(slot)
        return math.nan if room is None else room.blocks

    def learned_blocks(self, slot: int) -> float:
        """Return the number of blocks that a worker holds, as learned from answers, or NaN.

        NaN means that no answer has proven an eviction yet.
        """
        room = self._rooms.get(slot)
        return math.nan if room is None or not room.corrected else room.blocks

    def __len__(self) -> int:
        """Return the number of distinct blocks that are believed to be cached."""
        return len(self._mirror)

    @property
    def memory_bytes(self) -> int:
        """Memory in use, in bytes."""
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
            # Not less than it held when it looked: what came in since is counted as well.
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
        """Give each mirror an equal share of `max_blocks`.

        The share is halved as the number of mirrors doubles, so that it seldom changes.
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
    """Return when the block at `depth` was last used before this dispatch, or 0.

    The unit is the mirror's own count of uses. 0 means that the block proves nothing, because it
    was never seen before or is still being computed.
    """
    return next((used for end, used in prediction.runs if depth < end), 0)


def found_by(arrival: Arrival, finish: Finish, block_size: int, chain: Hashes) -> Found | None:
    """Return the number of cached blocks that an answer reports, or None if it reports none.

    The blocks of a text prompt are guessed at four bytes per token, and templates add tokens. So
    the cached share of the engine's prompt tokens is taken for the share of the guessed blocks,
    within an eighth. For a prompt of tokens, one block fewer than expected proves nothing: an
    engine computes at least one token anew, and with speculative decoding its last full block. For
    several prompts in one request the answer reports only their sum, so the result is None.
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
    """The cached blocks of a prompt that its worker should find, according to KV events.

    Lifetime: one dispatch.
    """

    worker_id: int
    chain: Hashes
    blocks: int  # leading blocks; at least 2, because an answer may find one fewer in any case
    life: int  # `HitConfidence.life` of the worker at the dispatch
    removed_blocks: int  # all that its events had ever removed until the dispatch
    alone: bool  # no other request waited at the worker, so it looked the prompt up at once

    def kept_blocks(self, removed_blocks: int) -> int:
        """Return how many of the expected blocks were surely cached when the worker looked.

        Requests that were computed first may have evicted the others. `removed_blocks` is the
        number of blocks that the worker's KV events have ever removed until now.
        """
        gone = 0 if self.alone else removed_blocks - self.removed_blocks
        return max(self.blocks - gone, 0)


ANSWERS = 16  # that looked for blocks known by events, before a worker's hits are discounted
_ANSWERS_AGAIN = 4  # the same of one that was discounted before its cache began anew
_FADE = 1 - 1 / ANSWERS  # of what an answer weighs, with each that follows
_DOUBTED, _BELIEVED = 0.5, 0.75  # confirmed share below, and from which on


@dataclass(slots=True)
class _Confirmed:
    """The mean share of the blocks reported by a worker's KV events that its answers found.

    Lifetime: until the worker's cache begins anew.
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
    """The share, 0..1, of each worker's hits by KV events that the router counts.

    The share is 1 unless the worker's answers keep finding less than half of the reported blocks.
    Then it is the mean share that they find, until the mean reaches three quarters. Recent answers
    weigh most in the mean. A worker is judged after `ANSWERS` answers, or after `_ANSWERS_AGAIN` if
    it was discounted before its cache began anew. A worker whose answers report no cached tokens
    keeps 1. Lifetime: process.
    """

    def __init__(self, confidence: Floats) -> None:
        """Keep `confidence`, float64[slots], up to date; it is 1 in slots without a worker."""
        self._confidence = confidence
        self._confirmed: dict[int, _Confirmed] = {}
        self._lives = [0] * len(confidence)
        self.discounted = 0  # workers

    def life(self, slot: int) -> int:
        """Return a number that changes whenever what is known of a worker's cache begins anew."""
        return self._lives[slot]

    def answered(self, slot: int, expected: int, found: Found) -> bool:
        """Count an answer that found `found` blocks where KV events promised `expected` blocks.

        Return True if the worker's hits are discounted from now on, or no longer.
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

    def forgive(self, slot: int) -> None:
        """Reset a worker's share to 1, because what is known of its cache begins anew.

        A worker that was discounted is judged again after fewer answers than other workers.
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
        """Forget a worker that left."""
        self.forgive(slot)
        self._confirmed.pop(slot, None)


def _names(stamp: int, count: int) -> Hashes:
    """Return `count` unique hashes for the blocks of an answer whose tokens are unknown."""
    return chain_hashes(np.zeros(count, dtype=np.int32), 1, stamp)


def answer_blocks(arrival: Arrival, finish: Finish, block_size: int) -> int:
    """Return the number of full blocks that an answer added to the cache.

    The last token of an answer is never cached.
    """
    kept_tokens = max((finish.output_tokens or 0) - 1, 0)
    prompt_tokens = finish.prompt_tokens or arrival.prompt_tokens
    return (prompt_tokens + kept_tokens) // block_size - prompt_tokens // block_size
