"""KV that another worker may read: the prompts of ended requests, held under a lease.

An export is one more holder of blocks beside requests and pins. It ends when its reader says so or
when its lease is over, whichever is first; its blocks stay in the prefix cache after it. What was
read is right if the same generation was still held when the reading ended: `is_held`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.block_pool import BlockPool, Tokens

EXTENSION = 2 / 3  # of a lease, that a sign of life adds, as in vLLM


@dataclass(slots=True)
class Export:
    """The KV of one prompt. Lifetime: until it is released or `until_s`."""

    request_id: int
    generation: int  # no two exports of a worker have the same
    prompt: Tokens
    block_ids: list[int]  # whole prompt, first block first
    until_s: float
    cached_tokens: int = 0  # of them, ones that this worker had not to compute


class Exports:
    """What `pool` holds for other workers; lifetime: worker. At most `most` prompts."""

    def __init__(self, pool: BlockPool, lease_s: float, most: int) -> None:
        self.lease_s = lease_s
        self.kept_total = 0
        self.expired_total = 0  # leases that ended before anybody released them
        self.refused_total = 0  # prompts beyond `most`, which nobody can read
        self._pool = pool
        self._most = most
        self._held: dict[int, Export] = {}  # by generation

    def __len__(self) -> int:
        return len(self._held)

    @property
    def held_blocks(self) -> int:
        """Blocks that exports hold; a shared one counts once."""
        return len({block for export in self._held.values() for block in export.block_ids})

    @property
    def next_s(self) -> float | None:
        """When the next lease ends; None: there is none."""
        return min((export.until_s for export in self._held.values()), default=None)

    def keep(
        self, request_id: int, prompt: Tokens, block_ids: Sequence[int], cached: int, now_s: float
    ) -> Export | None:
        """Hold the blocks of `prompt`, which somebody holds; None: too many are kept."""
        if len(self._held) >= self._most:
            self.refused_total += 1
            return None
        self._pool.hold(block_ids)
        self.kept_total += 1
        until_s = now_s + self.lease_s
        export = Export(request_id, self.kept_total, prompt, list(block_ids), until_s, cached)
        self._held[export.generation] = export
        return export

    def find(self, request_id: int, generation: int) -> Export | None:
        """The export, if it is still held."""
        export = self._held.get(generation)
        return export if export is not None and export.request_id == request_id else None

    def is_held(self, export: Export) -> bool:
        """Whether its blocks were its own all the time until now."""
        return self._held.get(export.generation) is export

    def extend(self, export: Export, now_s: float) -> None:
        """Its reader lives: the lease ends no sooner than EXTENSION of one from now."""
        export.until_s = max(export.until_s, now_s + self.lease_s * EXTENSION)

    def release(self, export: Export) -> bool:
        """Give its blocks back; False if that has happened before."""
        if not self.is_held(export):
            return False
        del self._held[export.generation]
        self._pool.release(export.block_ids)
        return True

    def advance(self, now_s: float) -> None:
        """Time has come to `now_s`: leases end."""
        for export in [one for one in self._held.values() if one.until_s <= now_s]:
            self.release(export)
            self.expired_total += 1
