"""Finds the block size that a worker's KV events agree on, whatever the worker reports itself.

Engines choose another size than they were told, or than they report: the attention block size in
hybrid models is raised to 768 and more. Events show it as the number of tokens per block name. An
event of one block that is smaller than the size in use may be the unfinished end of a prompt. It
counts only if there are no other events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_WINDOW = 64  # events that count at most; beyond it all counts are halved
_SURE = 16  # events of one size, before another one is given up for it
_SHARE = 15 / 16  # of the events, that must agree
_MIXED_SHARE = 1 / 4  # of the events in other sizes, from which on there is no single one
_PARTIAL = 8  # events of one small block each, of one size, before that is believed
_CHANGES = 4  # of the size in one life of the engine: each has all told anew


class BlockSizes:
    """Counts one worker's events by their block size. Lifetime: worker."""

    def __init__(self, size: int) -> None:
        self.size = size  # the one that is followed
        self.mixed = False  # there is no single size
        self.agreed_other = False  # the events agree on a size other than `size`
        self._changes = 0
        self._whole: Counter[int] = Counter()  # events by their size, lately
        self._partial: Counter[int] = Counter()

    def note(self, own: int, others: Iterable[tuple[int, int, int]]) -> None:
        """Count `own` events of the size in use, and (size, whole, unfinished) events of others."""
        self._whole[self.size] += min(own, _WINDOW)
        for size, whole, partial in others:
            self._whole[size] += min(whole, _WINDOW)
            self._partial[size] += partial
        while self._whole.total() > _WINDOW:
            self._whole = Counter({size: count // 2 for size, count in self._whole.items()})
        total, others_total = self._whole.total(), self._whole.total() - self._whole[self.size]
        self.agreed_other = self.agreed != self.size
        many = others_total >= max(_SURE, total * _MIXED_SHARE)
        self.mixed = many and not self.agreed_other

    @property
    def agreed(self) -> int:
        """The block size that the events agree on, or `size` if no other size has enough events."""
        if self._changes >= _CHANGES:
            return self.size
        whole = +self._whole
        if not whole:
            partial = +self._partial
            small = next(iter(partial), self.size)
            return small if len(partial) == 1 and partial[small] >= _PARTIAL else self.size
        best, count = whole.most_common(1)[0]
        first = not self._changes and not whole[self.size]
        sure = count >= _SHARE * whole.total() and (first or count >= _SURE)
        return best if sure and best else self.size

    def follow(self, size: int) -> None:
        """Use blocks of this size from now on."""
        self.size = size
        self._changes += 1
        self._forget()

    def begin_anew(self) -> None:
        """Forget all counts, because another life of the engine may have other blocks."""
        self._changes = 0
        self._forget()

    def _forget(self) -> None:
        self._whole.clear()
        self._partial.clear()
        self.mixed = self.agreed_other = False
