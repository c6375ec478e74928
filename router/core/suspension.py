"""When a policy that keeps failing is put aside, and when it is tried again."""

from __future__ import annotations

import math

BACKOFF_S = 10.0  # the first suspension
BACKOFF_MAX_S = 600.0  # it doubles up to here
TRIAL_DECISIONS = 20  # after a suspension: one fault is too many; without one all is forgiven
_IN_A_ROW = 0b11111  # faulty decisions that are too many
_RECENT = (1 << 20) - 1
_RECENT_FAULTS = 10  # more of the recent ones are too many


class Suspension:
    """One policy's record of faulty decisions. Lifetime: until another policy is set.

    Five in a row, or more than half of the last twenty, suspend it. After that it is tried again,
    where one fault suspends it for twice as long. Several faults between two decisions are one.
    """

    def __init__(self) -> None:
        self.active = False
        self.until_s = -math.inf  # of the latest suspension
        self.backoff_s = BACKOFF_S  # of the latest suspension, or of the next one
        self._recent = 0  # a bit for each decision, the latest lowest: 1 is faulty
        self._trial = 0  # decisions left of it, and one more: it is over when that one comes

    def decided(self) -> None:
        """A decision begins, good until `fault`."""
        self._recent = self._recent << 1 & _RECENT
        if self._trial:
            self._trial -= 1
            if not self._trial:
                self.backoff_s = BACKOFF_S

    def fault(self, now_s: float) -> bool:
        """The latest decision is faulty, or what followed on it; True when that suspends."""
        if self.active:
            return False
        self._recent |= 1
        in_a_row = self._recent & _IN_A_ROW == _IN_A_ROW
        if not (self._trial or in_a_row or self._recent.bit_count() > _RECENT_FAULTS):
            return False
        if self._trial:
            self.backoff_s = min(self.backoff_s * 2, BACKOFF_MAX_S)
        self.active = True
        self.until_s = now_s + self.backoff_s
        return True

    def end(self, now_s: float) -> bool:
        """End the suspension where its time is over: the trial begins. False: it goes on."""
        if now_s < self.until_s:
            return False
        self.active = False
        self._recent, self._trial = 0, TRIAL_DECISIONS + 1
        return True
