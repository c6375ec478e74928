"""One worker's blocks under its engine's own names: the plain-Python twin of `WorkerBlocks`."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvkernels.arguments_twin import data_bytes, in_range, names_of, parent_of, uint64
from kvkernels.batch_twin import MAX_BLOCK_SIZE, EventBatch
from kvkernels.blocks_file_twin import TIERS, FrozenBlocks, contents_of, read
from kvkernels.parked_twin import ParkedBlocks, Run
from kvkernels.seeds import chain_seed
from kvkernels.twins import _buffer, _integer, chain_hashes

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvkernels import PrefixIndex

__all__ = ["EventBatch", "WorkerBlocks"]


class Known(NamedTuple):
    """What a name stands for: a chain hash, and as bit t whether tier t holds it."""

    chain: int
    tiers: int


class WorkerBlocks:
    """What one worker's KV events say, told to the index; lifetime: worker.

    Blocks have the names that the engine gives them; `names` and chain hashes are buffers of
    uint64, `tokens` of int32. The index gets chain hashes: those given, or those computed from the
    tokens, on from the parent's. A run of blocks whose parent is unknown is parked until the parent
    comes (at most `max_parked` blocks); a parked block that is removed meanwhile never comes to
    life. A name that is stored again with another chain leaves the old one. Each tier has its own
    stores and removals; a name is known while any tier holds it.

    The counters only grow. `stored_blocks` and `removed_blocks` are those of tier 0, whose
    capacity says when a cache has turned over. `orphans`: blocks that were parked. `clears`: clear
    events in batches. `skipped_events`: events of other cache groups or block sizes, names without
    tokens that mean nothing, orphans for which there was no room.
    Of a hybrid model's cache groups the first told to be one of full attention counts, until then
    group 0; blocks told without a group count always.
    Raises IndexError for a worker the index does not have, ValueError for other bad arguments.
    """

    def __init__(
        self,
        index: PrefixIndex,
        worker: int,
        block_size: int,
        model: str,
        max_parked: int = 65536,
    ) -> None:
        self._worker = _integer(worker, "worker")
        if not 0 <= self._worker < index.workers:
            raise IndexError(f"worker must be 0..{index.workers - 1}, got {worker}")
        self._index = index
        self._block_size = in_range(block_size, "block_size", 1, MAX_BLOCK_SIZE)
        self._model = model
        self._parked = ParkedBlocks(in_range(max_parked, "max_parked", 0, 2**31 - 1))
        self._known: dict[int, Known] = {}
        self._group = 0
        self._full_attention = False  # somebody told of such a group: it is `_group`
        self.stored_blocks = 0
        self.removed_blocks = 0
        self.clears = 0
        self.orphans = 0
        self.skipped_events = 0

    def apply(self, batch: EventBatch) -> None:
        """All events of a batch, in order."""
        for event in batch.listed():
            if event[0] == "stored":
                self._take_stored(*event[1:])
            elif event[0] == "removed":
                self._take_removed(*event[1:])
            else:
                self.clears += 1
                self.clear()

    def store(self, names: Buffer, parent: int | None, chain: Buffer, tier: int = 0) -> None:
        """Blocks whose chain hashes are known (replays, recordings), in order."""
        blocks, hashes = names_of(names), _buffer(chain, "chain", "uint64").copy()
        tier = in_range(tier, "tier", 0, TIERS - 1)
        if len(hashes) != len(blocks):
            raise ValueError(f"chain must be {len(blocks)} hashes, one a name, not {len(hashes)}")
        self._store(Run(blocks, parent_of(parent), tier, chain=hashes), seed=0)

    def store_tokens(
        self,
        names: Buffer,
        parent: int | None,
        tokens: Buffer,
        seed: int,
        tier: int = 0,
        extras: Sequence[bytes] = (),
    ) -> None:
        """Blocks told by their tokens, in order; `seed` starts the chain where there is no parent.

        No tokens: the names are known already, from another tier. `extras`: bytes to hash after
        the tokens of each block, one a block, or none at all.
        """
        blocks, ids = names_of(names), _buffer(tokens, "tokens", "int32").copy()
        tier, seed = in_range(tier, "tier", 0, TIERS - 1), uint64(seed, "seed")
        for what, got, wanted in (
            ("tokens", len(ids), len(blocks) * self._block_size),
            ("extras", len(extras), len(blocks)),
        ):
            if got not in (0, wanted):
                raise ValueError(f"{what} must be {wanted} or none at all, not {got}")
        run = Run(blocks, parent_of(parent), tier, tokens=ids, extras=tuple(extras))
        self._store_told(run, seed)

    def remove(self, names: Buffer, tier: int = 0) -> None:
        """These blocks left a tier; those that are not known there change nothing."""
        self._remove(names_of(names), in_range(tier, "tier", 0, TIERS - 1))

    def clear(self) -> None:
        """Forget all, in the index too. Counts nothing."""
        self._index.clear_worker(self._worker)
        self._known.clear()
        self._parked.clear()

    def chains(self, tier: int = 0) -> npt.NDArray[np.uint64]:
        """uint64, ascending, each once: the chain hashes held in a tier."""
        bit = 1 << in_range(tier, "tier", 0, TIERS - 1)
        held = {known.chain for known in self._known.values() if known.tiers & bit}
        return np.array(sorted(held), dtype=np.uint64)

    def dump(self) -> bytes:
        """Everything but the counters, as bytes (`blocks_file_twin.py`)."""
        return self.frozen().dump()

    def frozen(self) -> FrozenBlocks:
        """All of it as it is now, for a thread to dump: a copy, made at once."""
        contents = contents_of(self._group, self._full_attention, self._known, self._parked)
        return FrozenBlocks(self._block_size, self._model, contents)

    def load(self, data: Buffer) -> None:
        """Replace everything by what `dump` gave, in the index too; the counters go on.

        ValueError, and nothing is changed, for bytes that `dump` did not write for a worker of the
        same model and block size.
        """
        contents = read(data_bytes(data, "data"), self._block_size, self._model, self._parked.limit)
        self.clear()
        self._group, self._full_attention = contents.group, contents.full_attention
        self._parked = contents.parked
        columns = (column.tolist() for column in contents[2:5])
        self._known = {name: Known(c, t) for name, c, t in zip(*columns, strict=True)}
        for tier in range(TIERS):
            self._tell_stored(contents.chains[contents.tiers >> tier & 1 > 0].tolist(), tier)

    def __len__(self) -> int:
        """Names known in any tier."""
        return len(self._known)

    @property
    def parked(self) -> int:
        """Blocks waiting for their parent."""
        return len(self._parked)

    @property
    def memory_bytes(self) -> int:
        """Bytes in use: a rough estimate here, exact in the native class."""
        return 200 * len(self._known) + 300 * len(self._parked)

    def _take_stored(
        self,
        names: npt.NDArray[np.uint64],
        parent: int | None,
        tokens: npt.NDArray[np.int32],
        block_size: int,
        tier: int,
        lora_name: str | None,
        salt: str | None,
        extras: tuple[bytes, ...],
        group: int | None,
        full_attention: bool,
    ) -> None:
        if full_attention and not self._full_attention:
            self._full_attention = True
            if (group or 0) != self._group:  # what came before was another group's
                self._group = group or 0
                self.clear()
        if group not in (None, self._group) or (len(tokens) and block_size != self._block_size):
            self.skipped_events += 1
            return
        run = Run(names.tolist(), parent, tier, tokens=tokens, extras=extras)
        self._store_told(run, chain_seed(self._model, lora_name, salt))

    def _take_removed(self, names: npt.NDArray[np.uint64], tier: int, group: int | None) -> None:
        if group in (None, self._group):
            self._remove(names.tolist(), tier)

    def _store_told(self, run: Run, seed: int) -> None:
        assert run.tokens is not None
        if len(run.tokens) or not run.names:
            self._store(run, seed)
            return
        known = [name for name in run.names if name in self._known]
        if len(known) < len(run.names):
            self.skipped_events += 1
        self._hold(known, [self._known[name].chain for name in known], run.tier)

    def _store(self, run: Run, seed: int) -> None:
        if not run.names:
            return
        self._parked.revive(run.names, run.tier)
        queue = [run]
        while queue:  # a parent that arrives late brings its parked descendants along
            run = queue.pop()
            if run.parent is not None:
                parent = self._known.get(run.parent)
                if parent is None:
                    self._park(run)
                    continue
                seed = parent.chain
            self._hold(run.names, _chain(run, self._block_size, seed), run.tier)
            queue += self._parked.wake(run.names)
            self._drop(self._parked.take_dead(run.names, run.tier), run.tier)

    def _park(self, run: Run) -> None:
        if self._parked.park(run):
            self.orphans += len(run.names)
        else:
            self.skipped_events += 1

    def _hold(self, names: Sequence[int], chain: Iterable[int], tier: int) -> None:
        """One block after another: store it, having dropped what its name stood for before."""
        pending: list[int] = []
        for name, block in zip(names, chain, strict=True):
            known = self._known.get(name, Known(block, 0))
            if known.chain != block:
                self._tell_stored(pending, tier)
                pending = []
                self._leave(known)
                known = Known(block, 0)
            self._known[name] = Known(block, known.tiers | 1 << tier)
            pending.append(block)
        self._tell_stored(pending, tier)
        self.stored_blocks += 0 if tier else len(names)

    def _leave(self, known: Known) -> None:
        for tier in range(TIERS):
            if known.tiers >> tier & 1:
                self._tell_removed([known.chain], tier)

    def _remove(self, names: Sequence[int], tier: int) -> None:
        self._parked.evict(names, tier)
        self._drop(names, tier)

    def _drop(self, names: Sequence[int], tier: int) -> None:
        gone: list[int] = []
        for name in names:
            known = self._known.get(name)
            if known is None or not known.tiers >> tier & 1:
                continue
            gone.append(known.chain)
            left = known.tiers & ~(1 << tier)
            self._known[name] = Known(known.chain, left)
            if not left:
                del self._known[name]
        self._tell_removed(gone, tier)

    def _tell_stored(self, chain: Sequence[int], tier: int) -> None:
        if chain:
            self._index.store(self._worker, array("Q", chain), tier)

    def _tell_removed(self, chain: Sequence[int], tier: int) -> None:
        if chain:
            self._index.remove(self._worker, array("Q", chain), tier)
        if tier == 0:
            self.removed_blocks += len(chain)


def _chain(run: Run, block_size: int, seed: int) -> list[int]:
    chain: list[int] = []
    if run.chain is not None:
        return [int(block) for block in run.chain]
    assert run.tokens is not None
    if not run.extras:
        return [int(block) for block in chain_hashes(run.tokens.data, block_size, seed)]
    for i, extra in enumerate(run.extras):
        tokens = run.tokens[i * block_size : (i + 1) * block_size].tobytes()
        seed = xxhash.xxh3_64_intdigest(seed.to_bytes(8, "little") + tokens + extra)
        chain.append(seed)
    return chain
