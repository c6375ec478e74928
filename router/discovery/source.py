"""What every source of workers is: it tells, again and again, all the workers that it knows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from router.worker_spec import WorkerSpec

MAX_SEEN = 4_096  # workers of one source, the most that a router can have
_REFUSED_MAX = 100


@dataclass(frozen=True, slots=True)
class Seen:
    """One worker as a source knows it."""

    spec: WorkerSpec
    stopping: bool = False  # it said that it ends: nothing new, and no surprise when it is gone


@dataclass(frozen=True, slots=True)
class Report:
    """All that a source knows now."""

    workers: tuple[Seen, ...] | None  # None: it could not be asked, what it said before stands
    trouble: str = ""  # what is wrong with it, for people
    refused: tuple[str, ...] = ()  # entries that cannot be used, and why


class Source(Protocol):
    """Where workers are named."""

    def reports(self) -> AsyncIterator[Report]:
        """A complete set whenever there is news; never ends by itself.

        What is wrong out there is a report; an exception is a defect of ours.
        """
        ...


def bounded(seen: list[Seen], refused: list[str], trouble: str = "") -> Report:
    """A report of no more than `MAX_SEEN` workers; what does not fit is named."""
    if len(seen) > MAX_SEEN:
        first = seen[MAX_SEEN].spec.name
        refused = [f"{len(seen) - MAX_SEEN} workers beyond {MAX_SEEN}, from {first}", *refused]
        seen = seen[:MAX_SEEN]
    if len(refused) > _REFUSED_MAX:
        more = len(refused) - _REFUSED_MAX
        refused = [*refused[:_REFUSED_MAX], f"and {more} more"]
    return Report(tuple(seen), trouble, tuple(refused))
