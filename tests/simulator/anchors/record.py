"""What one anchor is: a published result, its settings, and what our replay of it is held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.profiles import PROFILES

NEAR = 0.25  # a ratio that lies within this share of the published one is said to agree
TRACES = Path(__file__).parents[3].parent / "shared" / "traces"


@dataclass(frozen=True, slots=True)
class Hardware:
    """The GPUs of a source, and the profile of step times that stands for one of its workers."""

    gpus: str  # as the source has them, with the model
    right: str  # the profile of that model on those GPUs, whether or not there is one
    nearest: str = ""  # until then; "": `right` is there

    @property
    def profile(self) -> str:
        """The name of the profile that is used today."""
        return self.right if self.right in PROFILES or not self.nearest else self.nearest

    @property
    def told(self) -> str:
        """Both in a few words."""
        if self.profile == self.right:
            return f"`{self.right}`"
        return f"`{self.nearest}`, in place of `{self.right}`"


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of a source, which is a ratio of two rules, or a share."""

    what: str
    published: float
    why: str = ""  # ours is another one because ...; shown where it is not near
    short: float | None = None  # how near it comes in the shortened form; None: not asked there


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run of an anchor found."""

    ordered: bool  # the rules rank as published
    values: tuple[float | None, ...]  # ours, one for each that is compared; None: not in this form


@dataclass(frozen=True, slots=True)
class Anchor:
    """A published result with its settings. `measure(True)` replays all of it, else a part."""

    name: str  # one word, for the command line
    source: str  # who, what, year
    hardware: Hardware
    workload: str
    rules: str  # theirs = ours
    order: str  # how they rank in the source
    compared: tuple[Compared, ...]
    measure: Callable[[bool], Measured]
    needs: tuple[Path, ...] = ()  # files that are not in every checkout
    reach: str = ""  # what the source leaves out, what is put in its place, what was shortened

    @property
    def missing(self) -> list[str]:
        """Names of needed files that are not here."""
        return [path.name for path in self.needs if not path.exists()]


def near(ours: float, published: float, share: float = NEAR) -> bool:
    """Whether `ours` lies within `share` of the published value."""
    return abs(ours - published) <= share * published
