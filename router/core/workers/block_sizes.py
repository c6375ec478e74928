"""Finds the block size that a worker's KV events use, which the worker may report wrongly.

Some engines use another block size than they were configured with or than they report. For example,
hybrid models have attention blocks of 768 tokens and more. The events show the true size as the
number of tokens per block hash. An event with a single smaller block proves little, because it may
be the unfinished last block of a prompt. Such events count only if there are no others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_WINDOW = 64  # events that count at most; beyond it all counts are halved
_SURE = 16  # events of one size, before another one is given up for it
_SHARE = 15 / 16  # of the events, that must agree
_MIXED_SHARE = 1 / 4  # of the events in other sizes, from which on there is no single one
_PARTIAL = 8  # events of one small block each, all of one size, before that size is used
_CHANGES = 4  # most changes of the size in one life of the engine, because each needs a full replay


class BlockSizes:
    """Counts one worker's events by their block size. Lifetime: worker."""

    def __init__(self, size: int) -> None:
        self.size = size  # the size of the followed blocks
        self.mixed = False  # there is no single size
        self.agreed_other = False  # the events agree on a size other than `size`
        self._changes = 0
        self._whole: Counter[int] = Counter()  # recent events by their size
        self._partial: Counter[int] = Counter()

    def note(self, own: int, others: Iterable[tuple[int, int, int]]) -> None:
        """Count the block sizes of a worker's latest KV events. `own` is the number of events with
        the block size in use. `others` has for each other block size the size in tokens, the number
        of events that prove it, and the number of events whose block may be unfinished.
        """
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
        """The block size in tokens that nearly all recent KV events show. If no other size has
        enough events, it is the size in use (`size`).
        """
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
        """Make `size` the block size in use, and restart the counts of KV events."""
        self.size = size
        self._changes += 1
        self._forget()

    def on_engine_restart(self) -> None:
        """Restart the counts of KV events, because the engine may have another block size now."""
        self._changes = 0
        self._forget()

    def _forget(self) -> None:
        self._whole.clear()
        self._partial.clear()
        self.mixed = self.agreed_other = False
