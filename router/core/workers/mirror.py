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
    """What one dispatch will leave at its worker. Lifetime: dispatch."""

    slot: int
    chain: Hashes


class ExpectedBlocks:
    """Two generations of an index: a block is believed between `ttl_s` / 2 and `ttl_s`.

    It is believed no longer once its worker said that it is gone, nor where the dispatch came to
    nothing and no other one brings it. Expiry by dropping a generation whole costs nothing per
    block, so a dispatch stays one native call however long its prompt. Lifetime: process.
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
        """The worker in `slot` will soon hold this chain; to be `ended` with the dispatch."""
        self.expire(now_s)
        self._young.store(slot, chain)
        self._has_young = True
        expectation = Expectation(slot, chain)
        self._open.setdefault(slot, set()).add(expectation)
        return expectation

    def ended(self, expectation: Expectation, failed: bool) -> None:
        """A dispatch is over. `failed`: it was never computed, so only what others bring comes."""
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
        """The worker does not hold these blocks, whatever was expected."""
        if self._has_young:
            self._young.remove(slot, hashes)
        if self._has_old:
            self._old.remove(slot, hashes)

    def raise_prefix(self, blocks: Blocks, chain: Hashes) -> None:
        """Raise `blocks`, int32[slots], to the leading blocks expected on each worker."""
        if self._has_young:
            self._young.raise_prefix(chain, blocks)
        if self._has_old:
            self._old.raise_prefix(chain, blocks)

    def clear_worker(self, slot: int) -> None:
        """Expect nothing of this worker any more."""
        self._open.pop(slot, None)
        self._young.clear_worker(slot)
        self._old.clear_worker(slot)

    def expire(self, now_s: float) -> None:
        """Forget what is too old. Called with the time of every tick and dispatch."""
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
    """Leading blocks of both: a chain hash names all before it, so they end at one place."""
    most = min(len(one), len(other))
    same = one[:most] == other[:most]
    return most if same.all() else int(np.argmin(same))


BLOCKS_UNTOLD = 16_384  # room of a worker that does not tell: 262,144 tokens in blocks of 16

_SHRINK = 0.5  # of the way down to what was proven
_REGROW = 1 / 64  # of a block, for each that comes in, up to what was told
_REMEMBERED = 2  # blocks remembered for each that the worker told to have room for


@dataclass(slots=True)
class _Room:
    """How much one worker is believed to hold. Lifetime: until its cache begins anew."""

    told_blocks: float
    blocks: float  # as corrected
    corrected: bool = False  # by an answer that proved blocks gone
    most_blocks: int = 0  # it may ever be, bounded by what all mirrors share
    running: set[int] = field(default_factory=set)  # touches of requests that have not ended


@dataclass(slots=True)
class Prediction:
    """What was expected of a worker when a request was dispatched to it. Lifetime: dispatch."""

    slot: int
    chain: Hashes
    stamp: int  # of the mirror's touch
    hit_blocks: int
    runs: list[tuple[int, int]]  # (depth, when last used before; 0: unseen, or still in the making)
    room: _Room


@dataclass(frozen=True, slots=True)
class Found:
    """What the worker found: leading blocks of the chain, give or take `slack` fewer."""

    blocks: int
    slack: int


@dataclass(slots=True)
class MirrorCounters:
    """Lifetime: process. Only ever grow."""

    fewer: int = 0  # answers that proved blocks gone which were believed resident
    more: int = 0  # answers that proved blocks resident which were believed gone


class Mirrors:
    """All mirrors. At most `max_blocks` are remembered of all of them. Lifetime: process."""

    def __init__(self, slots: int, max_blocks: int) -> None:
        self.counters = MirrorCounters()
        self._mirror = Mirror(slots, max_blocks)
        self._max_blocks = max_blocks
        self._share = max_blocks
        self._rooms: dict[int, _Room] = {}

    def expect(self, slot: int, chain: Hashes, told_blocks: float) -> Prediction:
        """A dispatch will leave this chain on the worker in `slot`; what it will find there.

        `told_blocks`: room the worker told to have, NaN where it did not. From now on the chain
        is resident: siblings that follow will share it.
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
        """The worker computed the prompt; `found`: what it said of its hit, if it did.

        `answer_blocks`: full blocks that the answer left behind the prompt's.
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
        """The worker never computed the prompt: what only it was to bring is not there."""
        room = prediction.room
        room.running.discard(prediction.stamp)
        if room is self._rooms.get(prediction.slot):
            new = prediction.chain[prediction.hit_blocks :]
            self._mirror.forget(prediction.slot, new, prediction.stamp)

    def raise_prefix(self, blocks: Blocks, chain: Hashes) -> None:
        """Raise `blocks`, int32[slots], to the leading blocks mirrored on each worker."""
        if self._rooms:  # else every worker tells: the mirror is empty
            self._mirror.raise_prefix(chain, blocks)

    def clear_worker(self, slot: int) -> None:
        """The worker's cache began anew, or the worker left: nothing is known of it."""
        if self._rooms.pop(slot, None) is not None:
            self._mirror.clear_worker(slot)
            self._mirror.resize(slot, 0, 0)
            self._divide()

    def room_blocks(self, slot: int) -> float:
        """Blocks the worker is believed to have room for; NaN where nothing is mirrored."""
        room = self._rooms.get(slot)
        return math.nan if room is None else room.blocks

    def learned_blocks(self, slot: int) -> float:
        """The same, of a worker that did not tell, once answers have proven anything gone; NaN."""
        room = self._rooms.get(slot)
        return math.nan if room is None or not room.corrected else room.blocks

    def __len__(self) -> int:
        """Distinct blocks believed resident."""
        return len(self._mirror)

    @property
    def memory_bytes(self) -> int:
        """Bytes in use."""
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
        """Give each mirror its share; by powers of two, so that it seldom changes."""
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
    """When the block at `depth` of the chain had been used last; 0 where that proves nothing."""
    return next((used for end, used in prediction.runs if depth < end), 0)


def found_by(arrival: Arrival, finish: Finish, block_size: int, chain: Hashes) -> Found | None:
    """What an answer says of the hit; None where it does not.

    Of text only the share is known: its blocks are guessed at four bytes a token, and templates
    add tokens. So the share of the engine's prompt tokens that were cached is taken for the share
    of our blocks, within an eighth. Otherwise one block fewer than expected proves nothing: an
    engine computes at least one token anew, and with speculative decoding its last full block.
    Of several prompts in one request only the sum is told, so nothing is known of the first.
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
        """`confidence`: of each slot; 1 where nobody is."""
        self._confidence = confidence
        self._confirmed: dict[int, _Confirmed] = {}
        self._lives = [0] * len(confidence)
        self.discounted = 0  # workers

    def life(self, slot: int) -> int:
        """Another number whenever what is told of the cache there begins anew."""
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
        """What it tells of its cache begins anew. One that was discounted is soon judged again."""
        self._lives[slot] += 1
        known = self._confirmed.pop(slot, None)
        if known is None:
            return
        if known.doubted or (known.doubted_before and not known.enough):
            self._confirmed[slot] = _Confirmed(doubted_before=True)
        self.discounted -= known.doubted
        self._confidence[slot] = 1.0

    def forget(self, slot: int) -> None:
        """The worker left."""
        self.forgive(slot)
        self._confirmed.pop(slot, None)


def _names(stamp: int, count: int) -> Hashes:
    """Names that nobody else uses, for blocks of an answer whose tokens are not known here."""
    return chain_hashes(np.zeros(count, dtype=np.int32), 1, stamp)


def answer_blocks(arrival: Arrival, finish: Finish, block_size: int) -> int:
    """Blocks that an answer filled; its last token is never put into the cache."""
    kept_tokens = max((finish.output_tokens or 0) - 1, 0)
    prompt_tokens = finish.prompt_tokens or arrival.prompt_tokens
    return (prompt_tokens + kept_tokens) // block_size - prompt_tokens // block_size
