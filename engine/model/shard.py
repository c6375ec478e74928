"""Which part of a model one process has, in tensor and pipeline parallelism."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `tp_rank` of `tp_size` in every layer, stage `pp_rank` of `pp_size` of the layers.

    Raises ValueError for ranks outside their sizes.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        for name, rank, size in (
            ("tensor", self.tp_rank, self.tp_size),
            ("pipeline", self.pp_rank, self.pp_size),
        ):
            if not 0 <= rank < size:
                raise ValueError(f"{name}-parallel rank {rank} is outside 0..{size - 1}")

    def layers(self, total: int) -> range:
        """The layers of this stage, of `total`: runs of equal length, or one layer more."""
        return range(
            total * self.pp_rank // self.pp_size, total * (self.pp_rank + 1) // self.pp_size
        )

    def part(self, total: int) -> slice:
        """This rank's equal part of 0..`total`, which `tp_size` divides."""
        share = total // self.tp_size
        return slice(self.tp_rank * share, (self.tp_rank + 1) * share)

    def kv_heads(self, total: int) -> slice:
        """This rank's KV heads, of `total`; ranks share a head where there are more of them."""
        if total >= self.tp_size:
            return self.part(total)
        head = self.tp_rank * total // self.tp_size
        return slice(head, head + 1)

    @property
    def is_first(self) -> bool:
        """Its stage embeds the tokens."""
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """Its stage gives the logits."""
        return self.pp_rank == self.pp_size - 1
