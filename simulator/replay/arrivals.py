"""When requests come, which session they name, and a request under way."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Protocol

from policies.contract import Hashes
from policies.facts import UNIDENTIFIED, Identity, Role
from simulator.replay.setup import ClientIds
from simulator.replay.station import Station
from simulator.traces.job import Job
from simulator.traces.sessions import sessions


class NamedSessions:
    """Gives requests the ids that their clients would send. Lifetime: replay.

    ids: "agents": the session, its parent and its group, as coding agents send them. "group": the
    group's id as each request's session. "key": one `prompt_cache_key` for a whole group. "none":
    nothing.
    no_session_share: the share of sessions, [0, 1], whose clients send nothing. A client always
    sends ids or never, so the draw is the session's and not the request's.
    """

    def __init__(self, seed: int, ids: ClientIds, no_session_share: float) -> None:
        self._seed, self._ids, self._share = seed, ids, no_session_share

    def of(self, job: Job) -> tuple[str | None, Identity]:
        """Return the session's id and the rest of the identity that the router reads."""
        group = job.group
        if self._ids == "none" or self._unnamed(job.session if group is None else group):
            return None, UNIDENTIFIED
        if self._ids == "key":
            key = job.session if group is None else group
            return None, UNIDENTIFIED if key is None else Identity(cache_group=key)
        if self._ids == "group":
            return job.session if group is None else group, UNIDENTIFIED
        session = group if job.side and group is not None else job.session
        if group is None and job.parent is None and not job.final:
            return session, UNIDENTIFIED
        return session, Identity(group=group, parent=job.parent, final=job.final)

    def _unnamed(self, name: str | None) -> bool:
        if not self._share or name is None:
            return False
        return Random(f"{self._seed}/no session/{name}").random() < self._share


class TimedTurn:
    """A job, when it comes, and which turn of which session it is. Lifetime: request."""

    __slots__ = ("at_ns", "job", "number", "session")

    def __init__(self, at_ns: int, job: Job, session: list[Job] | None, number: int) -> None:
        self.at_ns = at_ns
        self.job = job
        self.session = session  # its turns in order; None: nothing waits for this one
        self.number = number


class Arrivals(Protocol):
    """Where requests come from."""

    total: int | None  # requests that will come; None: not known beforehand

    def pull(self) -> TimedTurn | None:
        """The next one whose time was known beforehand, in order of time; None: no more."""

    def after(self, turn: TimedTurn, now_ns: int) -> TimedTurn | None:
        """The one that the end of `turn` at `now_ns` sets free, at or after now."""


class OpenLoopArrivals:
    """Every request at its own time, whatever becomes of the others. Lifetime: replay."""

    total: int | None = None  # its source may know

    def __init__(self, jobs: Iterator[Job]) -> None:
        self._jobs = jobs

    def pull(self) -> TimedTurn | None:
        job = next(self._jobs, None)
        return None if job is None else TimedTurn(job.at_ns, job, None, 0)

    def after(self, turn: TimedTurn, now_ns: int) -> TimedTurn | None:
        return None


class ClosedLoop:
    """A session begins at its first turn's time; each further turn waits for the answer.

    It comes `think_ns` after the answer before it reached the client, or was refused to it; where
    no pause was recorded, as long after as the two turns' recorded arrivals lie apart. Holds all
    jobs. Lifetime: replay.
    """

    def __init__(self, jobs: Iterator[Job]) -> None:
        starts = [turns for _session, turns in sessions(jobs)]
        self.total: int | None = sum(map(len, starts))
        starts.sort(key=lambda turns: turns[0].at_ns)  # stable
        self._starts = iter(starts)

    def pull(self) -> TimedTurn | None:
        turns = next(self._starts, None)
        return None if turns is None else TimedTurn(turns[0].at_ns, turns[0], turns, 0)

    def after(self, turn: TimedTurn, now_ns: int) -> TimedTurn | None:
        turns, number = turn.session, turn.number + 1
        if turns is None or number == len(turns):
            return None
        job = turns[number]
        pause_ns = job.at_ns - turn.job.at_ns if job.think_ns is None else job.think_ns
        return TimedTurn(now_ns + max(pause_ns, 0), job, turns, number)


class Live:
    """Lifetime: request."""

    __slots__ = ("begun", "chain", "leg", "station", "turn")

    def __init__(self, turn: TimedTurn, chain: Hashes) -> None:
        self.turn = turn
        self.chain = chain  # full blocks of its prompt, then those known of its answer
        self.station: Station | None = None  # where it was sent; None: held, or it failed there
        self.begun = False  # its client has the first token
        self.leg: Role = "both"  # what it was sent for
