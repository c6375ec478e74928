"""Session files: one conversation a line, recorded from its start, with the client's pauses.

    {"id": "a", "block_size": 64, "requests": [{"t": 0.0, "in": 130, "out": 9, "think_time": 0.0,
     "hash_runs": [[1, 2]]}, ...]}

`hash_runs` are `[first id, count]`. Ids are local to a session. A sub-agent (`id` "a/agent_1", `t0`
its start within "a", on a line after it) shares the name space of its parent (coding-agent sessions
of callanjfox/kv-cache-tester). "a" and its sub-agents are a group; a session without sub-agents is
in none. The blocks that a turn's answer completes are taken from the next turn, if it continues
this one. Before its first turn, a sub-agent pauses from its parent's answer to `t0` (`api_time` is
how long the answer took).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from random import Random
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from policies.contract import Hashes
from simulator.traces.job import NO_IDS, ErrorLog, Job, LineError
from simulator.traces.mooncake import DECODE_ERRORS, OutputTokens, PromptTokens, SessionId
from simulator.traces.timing import NS

BLOCK_TOKENS = 64
SESSION_BITS = 32  # local ids are below 2^32
MAX_LOCAL_ID = (1 << SESSION_BITS) - 1

Seconds = Annotated[float, msgspec.Meta(ge=0, le=10 * 366 * 86_400)]
LocalId = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOCAL_ID)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class SessionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options for session starts, which the file does not say.

    Sub-agents start within their parents.
    """

    span_s: Annotated[
        Positive,
        msgspec.Meta(description="seconds in which all sessions begin, at random times"),
    ] = 3600.0
    rate: Annotated[
        Positive | None,
        msgspec.Meta(description="sessions that begin per second (Poisson), in place of span_s"),
    ] = None
    gap_s: Annotated[
        Positive, msgspec.Meta(description="seconds of the longest pause; longer pauses are cut")
    ] = 300.0


class _Request(msgspec.Struct, frozen=True, gc=False):
    t: Seconds
    prompt_tokens: PromptTokens = msgspec.field(name="in")
    output_tokens: OutputTokens = msgspec.field(name="out")
    hash_runs: list[tuple[LocalId, LocalId]]
    think_time: Seconds | None = None
    api_time: Seconds | None = None


class _Session(msgspec.Struct, frozen=True):
    id: SessionId
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    requests: Annotated[list[_Request], msgspec.Meta(min_length=1)]
    t0: Seconds | None = None


class _Root(msgspec.Struct, frozen=True):
    """A conversation whose sub-agents may follow. Lifetime: until the next one."""

    name: str
    start_ns: int
    number: int
    session: _Session
    times: list[tuple[float, int]]  # (recorded seconds, ns with long gaps cut), ascending

    def within_ns(self, t0: float, gap_s: float) -> int:
        """Return the time in ns for `t0` of the recording, after long gaps of this
        session are cut.
        """
        before = [(0.0, 0), *(pair for pair in self.times if pair[0] <= t0)]
        recorded_s, cut_ns = before[-1]
        return cut_ns + round(min(gap_s, t0 - recorded_s) * NS)

    def pause_ns(self, t0: float, gap_s: float) -> int | None:
        """Return the pause from the answer of the last turn before `t0` until `t0`, in ns.

        Returns None if it was not recorded.
        """
        before = [request for request in self.session.requests if request.t <= t0]
        if not before or before[-1].api_time is None:
            return None
        return round(min(gap_s, max(0.0, t0 - before[-1].t - before[-1].api_time)) * NS)


class _Opened(NamedTuple):
    """A session of the file, and the time at which it starts. Lifetime: until the next session that
    is no sub-agent's.
    """

    number: int  # its line
    session: _Session
    start_ns: int


def block_size_of(raw: bytes, _: SessionOptions) -> int | None:
    """Return the number of tokens for which an id of this line stands, or None if the line does not
    say.
    """
    try:
        return msgspec.json.decode(raw, type=_Session).block_size
    except DECODE_ERRORS:
        return None


def count_roots(lines: Iterable[tuple[int, bytes]]) -> int:
    """Return the number of sessions that are not sub-agents."""
    decode = msgspec.json.Decoder(_Session).decode
    count = 0
    for _, raw in lines:
        try:
            count += "/" not in decode(raw).id
        except DECODE_ERRORS:
            continue
    return count


def starts_ns(options: SessionOptions, roots: int, seed: int) -> Iterator[int]:
    """Yield the times at which sessions start, ascending: one for each session that is no
    sub-agent's, in the file's order.
    """
    random = Random(f"sessions {seed}")
    at_s = 0.0
    for left in range(roots, 0, -1):
        if options.rate is not None:
            at_s += random.expovariate(options.rate)
        else:
            # The least of the `left` uniform draws that remain between here and the end.
            at_s += (options.span_s - at_s) * (1 - (1 - random.random()) ** (1 / left))
        yield round(at_s * NS)


def read_sessions(
    lines: Iterable[tuple[int, bytes]],
    errors: ErrorLog,
    starts: Iterator[int],
    block_tokens: int,
    gap_s: float,
) -> Iterator[Job]:
    """Yield the requests of all sessions in order of arrival; only sessions under way are held."""
    decode = msgspec.json.Decoder(_Session).decode
    under_way: UnderWay = []
    root: _Root | None = None
    family: list[_Opened] = []  # the root and its sub-agents
    roots = 0

    def begin() -> None:
        for one in family:
            assert root is not None
            jobs = _jobs(one, root, len(family) > 1, block_tokens, gap_s)
            first = next(jobs)
            heappush(under_way, (first.at_ns, one.number, first, jobs))
        family.clear()

    for number, raw in lines:
        try:
            session = _checked(decode, raw, block_tokens)
            if "/" not in session.id:
                start_ns = next(starts)
                begin()
                yield from jobs_before(under_way, start_ns)
                root = _Root(session.id, start_ns, roots, session, _times(session, gap_s))
                roots += 1
            elif root is None or session.id.partition("/")[0] != root.name:
                raise LineError(f"id: {session.id!r} is a sub-agent of no session just before it")
            else:
                start_ns = root.start_ns + root.within_ns(session.t0 or 0.0, gap_s)
        except LineError as error:
            errors.add(number, error)
            continue
        family.append(_Opened(number, session, start_ns))
    if not roots:
        raise errors.nothing_read()
    begin()
    yield from jobs_before(under_way, 1 << 62)


UnderWay = list[tuple[int, int, Job, Iterator[Job]]]  # a heap: arrival, serial, job, those after it


def jobs_before(under_way: UnderWay, end_ns: int) -> Iterator[Job]:
    """Take the jobs that come before `end_ns` out of a heap of sessions in progress, and yield
    them.
    """
    while under_way and under_way[0][0] < end_ns:
        _, number, job, rest = heappop(under_way)
        yield job
        following = next(rest, None)
        if following is not None:
            heappush(under_way, (following.at_ns, number, following, rest))


def _checked(decode: Callable[[bytes], _Session], raw: bytes, block_tokens: int) -> _Session:
    try:
        session = decode(raw)
    except DECODE_ERRORS as error:
        raise LineError(str(error)) from error
    if session.block_size != block_tokens:
        raise LineError(f"block_size: {session.block_size}; expected {block_tokens}, as before it")
    last_s = 0.0
    for number, request in enumerate(session.requests):
        where = f"requests[{number}]"
        if request.t < last_s:
            raise LineError(f"{where}.t: goes back to {request.t:g} from {last_s:g}")
        last_s = request.t
        blocks = sum(count for _, count in request.hash_runs)
        full = request.prompt_tokens // block_tokens
        if blocks != full:
            raise LineError(f"{where}.hash_runs: {blocks} ids; expected {full}, one a full block")
        if any(first + count > MAX_LOCAL_ID for first, count in request.hash_runs):
            raise LineError(f"{where}.hash_runs: an id above {MAX_LOCAL_ID}")
    return session


def _times(session: _Session, gap_s: float) -> list[tuple[float, int]]:
    times, at_s, last_s = [], 0.0, 0.0
    for request in session.requests:
        at_s += min(gap_s, request.t - last_s)
        last_s = request.t
        times.append((request.t, round(at_s * NS)))
    return times


def _jobs(
    opened: _Opened, root: _Root, grouped: bool, block_tokens: int, gap_s: float
) -> Iterator[Job]:
    session, base = opened.session, root.number << SESSION_BITS
    requests = session.requests
    times = _times(session, gap_s)
    parent = None if session is root.session else root.name
    ids = _ids(requests[0], base)
    for index, request in enumerate(requests):
        following = _ids(requests[index + 1], base) if index + 1 < len(requests) else NO_IDS
        full = len(ids)
        end = (request.prompt_tokens + request.output_tokens) // block_tokens
        goes_on = len(following) >= full and np.array_equal(following[:full], ids)
        pause_s = request.think_time
        think_ns = None if pause_s is None else round(min(gap_s, pause_s) * NS)
        if parent is not None and not index:
            think_ns = root.pause_ns((session.t0 or 0.0) + request.t, gap_s)
        yield Job(
            opened.start_ns + times[index][1],
            request.prompt_tokens,
            request.output_tokens or 1,
            ids,
            answer_ids=following[full:end] if goes_on else NO_IDS,
            session=session.id,
            group=root.name if grouped else None,
            parent=parent,
            think_ns=think_ns,
        )
        ids = following


def _ids(request: _Request, base: int) -> Hashes:
    runs = [
        np.arange(base + first, base + first + count, dtype=np.uint64)
        for first, count in request.hash_runs
    ]
    return np.concatenate(runs) if runs else NO_IDS
