"""Session files: one conversation a line, recorded from its start, with the client's pauses.

    {"id": "a", "block_size": 64, "requests": [{"t": 0.0, "in": 130, "out": 9, "think_time": 0.0,
     "hash_runs": [[1, 2]]}, ...]}

`hash_runs` are `[first id, count]`; ids are local to a session, and a sub-agent (`id` "a/agent_1",
`t0` its start within "a", on a line after it) shares the name space of its parent (coding-agent
sessions of callanjfox/kv-cache-tester). What a turn's answer completes is read off the next turn,
where that goes on from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from random import Random
from typing import Annotated

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
    """When sessions start, as the file does not say. Sub-agents start within their parents."""

    span_s: Annotated[Positive, msgspec.Meta(description="starts uniform over so long")] = 3600.0
    rate: Annotated[
        Positive | None, msgspec.Meta(description="instead: Poisson starts, so many a second")
    ] = None
    gap_s: Annotated[
        Positive, msgspec.Meta(description="longer gaps between requests, and pauses, are cut")
    ] = 300.0


class _Request(msgspec.Struct, frozen=True, gc=False):
    t: Seconds
    prompt_tokens: PromptTokens = msgspec.field(name="in")
    output_tokens: OutputTokens = msgspec.field(name="out")
    hash_runs: list[tuple[LocalId, LocalId]]
    think_time: Seconds | None = None


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
    times: list[tuple[float, int]]  # (recorded seconds, ns with long gaps cut), ascending


def block_size_of(raw: bytes, _: SessionOptions) -> int | None:
    """Tokens an id stands for, where the line says."""
    try:
        return msgspec.json.decode(raw, type=_Session).block_size
    except DECODE_ERRORS:
        return None


def count_roots(lines: Iterable[tuple[int, bytes]]) -> int:
    """Number of sessions that are nobody's sub-agents."""
    decode = msgspec.json.Decoder(_Session).decode
    count = 0
    for _, raw in lines:
        try:
            count += "/" not in decode(raw).id
        except DECODE_ERRORS:
            continue
    return count


def starts_ns(options: SessionOptions, roots: int, seed: int) -> Iterator[int]:
    """Times at which sessions start, ascending: one for each root, in the file's order."""
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
    """The requests of all sessions in order of arrival; holds the sessions that are under way."""
    decode = msgspec.json.Decoder(_Session).decode
    under_way: list[tuple[int, int, Job, Iterator[Job]]] = []
    root: _Root | None = None
    roots = 0
    for number, raw in lines:
        try:
            session = _checked(decode, raw, block_tokens)
            if "/" not in session.id:
                start_ns = next(starts)
                yield from _before(under_way, start_ns)
                root = _Root(session.id, start_ns, roots, _times(session, gap_s))
                roots += 1
            elif root is None or session.id.partition("/")[0] != root.name:
                raise LineError(f"id: {session.id!r} is a sub-agent of no session just before it")
            else:
                start_ns = root.start_ns + _within(root, session.t0 or 0.0, gap_s)
        except LineError as error:
            errors.add(number, error)
            continue
        jobs = _jobs(session, root.number << SESSION_BITS, start_ns, block_tokens, gap_s)
        first = next(jobs)
        heappush(under_way, (first.at_ns, number, first, jobs))
    if not roots:
        raise errors.nothing_read()
    yield from _before(under_way, 1 << 62)


def _before(under_way: list[tuple[int, int, Job, Iterator[Job]]], end_ns: int) -> Iterator[Job]:
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


def _within(root: _Root, t0: float, gap_s: float) -> int:
    """Where `t0` of the recording lies once the long gaps of `root` are cut."""
    before = [(0.0, 0), *(pair for pair in root.times if pair[0] <= t0)]
    recorded_s, cut_ns = before[-1]
    return cut_ns + round(min(gap_s, t0 - recorded_s) * NS)


def _jobs(
    session: _Session, base: int, start_ns: int, block_tokens: int, gap_s: float
) -> Iterator[Job]:
    requests = session.requests
    times = _times(session, gap_s)
    ids = _ids(requests[0], base)
    for index, request in enumerate(requests):
        following = _ids(requests[index + 1], base) if index + 1 < len(requests) else NO_IDS
        full = len(ids)
        end = (request.prompt_tokens + request.output_tokens) // block_tokens
        goes_on = len(following) >= full and np.array_equal(following[:full], ids)
        pause_s = request.think_time
        yield Job(
            start_ns + times[index][1],
            request.prompt_tokens,
            request.output_tokens or 1,
            ids,
            answer_ids=following[full:end] if goes_on else NO_IDS,
            session=session.id,
            think_ns=None if pause_s is None else round(min(gap_s, pause_s) * NS),
        )
        ids = following


def _ids(request: _Request, base: int) -> Hashes:
    runs = [
        np.arange(base + first, base + first + count, dtype=np.uint64)
        for first, count in request.hash_runs
    ]
    return np.concatenate(runs) if runs else NO_IDS
