"""What is thought of one worker, by what became of the requests it was given."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from router.core.window import Window

_CAUSES = 32  # told apart; there are a dozen, but a recording may hold anything

# "in" takes requests; "aside" gets none; "asked" is aside until a probe's answer; "trial" takes
# one request at a time, until one was answered.
Place = Literal["in", "aside", "asked", "trial"]


@dataclass(slots=True)
class Repute:
    """Lifetime: worker. `outliers.Outliers` alone changes it."""

    recent: Window  # (answers, failures)
    place: Place = "in"
    failures: int = 0  # in a row
    asides: int = 0  # in a row, each longer than the one before
    since_s: float = field(default=float("-inf"))  # when it was put aside
    until_s: float = field(default=float("-inf"))  # until it is asked (again), or remembered
    trial: int | None = None  # the one request it has on trial
    causes: Counter[str] = field(default_factory=Counter)  # all failures ever, by cause

    @property
    def takes_requests(self) -> bool:
        """Whether it may be given another request."""
        return self.place == "in" or (self.place == "trial" and self.trial is None)

    def blamed(self, cause: str) -> None:
        """Count a failure by its cause."""
        known = cause in self.causes or len(self.causes) < _CAUSES
        self.causes[cause if known else "other"] += 1

    def forgive(self) -> None:
        """Think of it as of a new one; what was counted stays."""
        self.place = "in"
        self.failures = self.asides = 0
        self.trial = None
        self.recent.clear()
