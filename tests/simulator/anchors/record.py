"""The record of one anchor: a published result, its settings, and how near our replay must come to
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.profiles import PROFILES

NEAR = 0.25  # a ratio within this share of the published one counts as near
TRACES = Path(__file__).parents[3].parent / "shared" / "traces"


@dataclass(frozen=True, slots=True)
class Hardware:
    """The GPUs of a published result, and the profile of step times that stands for one of its
    workers.
    """

    gpus: str  # as the source has them, with the model
    right: str  # the profile of that model on those GPUs, whether or not there is one
    nearest: str = ""  # the profile in use until `right` exists; "": `right` exists

    @property
    def profile(self) -> str:
        """The name of the profile in use: that of these GPUs if it exists, else the nearest one."""
        return self.right if self.right in PROFILES or not self.nearest else self.nearest

    @property
    def as_markdown(self) -> str:
        """The profile as Markdown; if it is only the nearest one, with the one that is missing."""
        if self.profile == self.right:
            return f"`{self.right}`"
        return f"`{self.nearest}`, in place of `{self.right}`"


@dataclass(frozen=True, slots=True)
class Compared:
    """One published figure and ours: a ratio of two rules, or a share."""

    what: str
    published: float
    why: str = ""  # why our figure differs; shown if it is not near
    short: float | None = None  # allowed error of the short form; None: not checked there


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of one run of an anchor."""

    ordered: bool  # the rules rank as published
    values: tuple[float | None, ...]  # ours, one for each of `compared`; None: not in this form


@dataclass(frozen=True, slots=True)
class Anchor:
    """A published result with its settings. `measure(True)` replays all of it, `measure(False)` a
    short form.
    """

    name: str  # one word, for the command line
    source: str  # who, what, year
    hardware: Hardware
    workload: str
    rules: str  # the source's names = ours
    order: str  # how they rank in the source
    compared: tuple[Compared, ...]
    measure: Callable[[bool], Measured]
    needs: tuple[Path, ...] = ()  # files that are not in every checkout
    reach: str = ""  # what the source leaves out, what is put in its place, what was shortened

    @property
    def missing(self) -> list[str]:
        """The names of the files that the anchor needs and that are missing on this machine."""
        return [path.name for path in self.needs if not path.exists()]


def near(ours: float, published: float, share: float = NEAR) -> bool:
    """Return whether `ours` lies within `share` (relative) of the published value."""
    return abs(ours - published) <= share * published
