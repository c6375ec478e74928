"""The arrivals of requests in a replay, and the session ids that the requests name."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from random import Random
from typing import Protocol

from policies.contract import Hashes
from policies.facts import UNIDENTIFIED, Identity, Role
from simulator.replay.setup import ClientIds
from simulator.replay.station import Station
from simulator.traces.job import Job
from simulator.traces.sessions import sessions


class NamedSessions:
    """Gives requests the ids that their clients would send.

    Lifetime: replay. `ids` says which ids these are. "agents": the session, its parent and its
    group, as coding agents send them. "group": the group's id as each request's session. "key": one
    `prompt_cache_key` for a whole group. "none": nothing. `no_session_share` is the share of
    sessions, [0, 1], whose clients send nothing. A client always sends ids or never, so it is drawn
    once for each session and not for each request.
    """

    def __init__(self, seed: int, ids: ClientIds, no_session_share: float) -> None:
        self._seed, self._ids, self._share = seed, ids, no_session_share

    def of(self, job: Job) -> tuple[str | None, Identity]:
        """Return the id of the job's session and its other ids, as the router reads them."""
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


class SessionCourse:
    """The state of one session in a closed loop: its turns, the session that started it, and the
    sub-agents that it waits for. Lifetime: replay.
    """

    __slots__ = ("awaited", "held", "opener", "opens", "over", "turns")

    def __init__(self, turns: list[Job]) -> None:
        self.turns = turns  # in order
        self.opener: tuple[SessionCourse, int] | None = None  # the session and turn that started it
        self.opens: dict[
            int, list[SessionCourse]
        ] = {}  # by turn, the sessions that its answer starts
        self.held: TimedTurn | None = None  # a turn that waits for sub-agents
        self.awaited: set[SessionCourse] = set()  # those of them that have not ended
        self.over = False


class TimedTurn:
    """A job with its time of arrival and its number in its session. Lifetime: request."""

    __slots__ = ("at_ns", "course", "job", "number")

    def __init__(self, at_ns: int, job: Job, course: SessionCourse | None, number: int) -> None:
        self.at_ns = at_ns
        self.job = job
        self.course = course  # None: no session waits for this one
        self.number = number


class Arrivals(Protocol):
    """The source of a replay's requests."""

    total: int | None  # requests that will come; None: not known beforehand

    def pull(self) -> TimedTurn | None:
        """Return the next turn whose time was known before the replay, in order of time; None if
        there are no more.
        """

    def after(self, turn: TimedTurn, now_ns: int) -> Sequence[TimedTurn]:
        """Return the turns that can be sent because `turn` ended at `now_ns`; each is sent then or
        later.
        """


class OpenLoopArrivals:
    """Sends every request at its recorded time, whatever happened to other requests. Lifetime:
    replay.
    """

    total: int | None = None  # its source may know

    def __init__(self, jobs: Iterator[Job]) -> None:
        self._jobs = jobs

    def pull(self) -> TimedTurn | None:
        job = next(self._jobs, None)
        return None if job is None else TimedTurn(job.at_ns, job, None, 0)

    def after(self, turn: TimedTurn, now_ns: int) -> Sequence[TimedTurn]:
        return ()


class ClosedLoop:
    """Sends each turn of a session after the answer to its previous turn. Lifetime: replay.

    A session begins at the time of its first turn. A later turn comes `think_ns` after the previous
    answer reached the client, or was refused; if no pause was recorded, the time between the two
    recorded arrivals takes its place. A sub-agent begins, with the same pause, after the last turn
    of its parent that was recorded before the sub-agent's start. A side request begins after that
    turn of the main agent, which is the session that has the group's name. If that session or turn
    is missing, the request comes at its recorded time.

    A turn whose job `waits_for` sub-agents of its session comes when the last of them has ended, or
    at its recorded time if that is later. Sub-agents that are missing, or that do not begin before
    that turn, are not waited for. All jobs are held in memory.
    """

    def __init__(self, jobs: Iterator[Job]) -> None:
        self._courses: dict[str, SessionCourse] = {}
        starts: list[SessionCourse] = []
        self.total: int | None = 0
        for name, turns in sessions(jobs):
            self.total += len(turns)
            course = SessionCourse(turns)
            # Only an earlier session can be its opener, so that no two wait for each other.
            course.opener = self._opener(turns[0])
            if course.opener is None:
                starts.append(course)
            else:
                opener, number = course.opener
                opener.opens.setdefault(number, []).append(course)
            if name is not None:
                self._courses[name] = course
        starts.sort(key=lambda course: course.turns[0].at_ns)  # stable
        self._starts = iter(starts)

    def _opener(self, first: Job) -> tuple[SessionCourse, int] | None:
        name = first.group if first.side else first.parent
        opener = None if name is None else self._courses.get(name)
        if opener is None:
            return None
        number = bisect_right(opener.turns, first.at_ns, key=lambda job: job.at_ns) - 1
        return (opener, number) if number >= 0 else None

    def pull(self) -> TimedTurn | None:
        course = next(self._starts, None)
        return (
            None if course is None else TimedTurn(course.turns[0].at_ns, course.turns[0], course, 0)
        )

    def after(self, turn: TimedTurn, now_ns: int) -> Sequence[TimedTurn]:
        course, number = turn.course, turn.number + 1
        if course is None:
            return ()
        freed: list[TimedTurn] = []
        if number == len(course.turns):
            course.over = True
            freed += _released_by(course, now_ns)
        else:
            following = _timed(course, number, turn.job, now_ns)
            course.awaited = self._awaited(course, number)
            if course.awaited:
                course.held = following
            else:
                freed.append(following)
        freed += [_timed(own, 0, turn.job, now_ns) for own in course.opens.get(turn.number, ())]
        return freed

    def _awaited(self, course: SessionCourse, number: int) -> set[SessionCourse]:
        """Return the sessions that the turn with this number has to wait for."""
        named = (self._courses.get(name) for name in course.turns[number].waits_for)
        return {
            one
            for one in named
            if one is not None
            and not one.over
            and one.opener is not None
            and one.opener[0] is course
            and one.opener[1] < number
        }


def _timed(course: SessionCourse, number: int, before: Job, now_ns: int) -> TimedTurn:
    """Return a turn of `course` with its time. The turn `before`, which comes before it or before
    the start of its session, has ended just now.
    """
    job = course.turns[number]
    pause_ns = job.at_ns - before.at_ns if job.think_ns is None else job.think_ns
    return TimedTurn(now_ns + max(pause_ns, 0), job, course, number)


def _released_by(course: SessionCourse, now_ns: int) -> list[TimedTurn]:
    """Return the parent's turn that waited only for the sub-agent `course`, which ended just now,
    as a list of one; an empty list if no turn did.
    """
    if course.opener is None or (held := course.opener[0].held) is None:
        return []
    opener = course.opener[0]
    opener.awaited.discard(course)
    if opener.awaited:
        return []
    opener.held = None
    held.at_ns = max(held.at_ns, now_ns)
    return [held]


class Live:
    """A request in progress in a replay. Lifetime: request."""

    __slots__ = ("begun", "chain", "leg", "station", "turn")

    def __init__(self, turn: TimedTurn, chain: Hashes) -> None:
        self.turn = turn
        self.chain = chain  # full blocks of its prompt, then those known of its answer
        self.station: Station | None = None  # where it was sent; None: held, or it failed there
        self.begun = False  # its client has the first token
        self.leg: Role = "both"  # what it was sent for
