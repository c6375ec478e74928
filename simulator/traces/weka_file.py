"""Weka's traces of coding agents (AgentX): one session with its sub-agents a line.

    {"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": [
     {"type": "n", "t": 0.0, "in": 130, "out": 9, "hash_ids": [1, 2], "api_time": 1.5},
     {"type": "subagent", "t": 2.0, "agent_id": "b", "status": "completed", "requests": [...]},
     {"type": "s", "t": 9.0, ...}]}

The form is that of kv-cache-tester and of AIPerf (`weka_trace_models.py`, 2026). Ids name a block's
content within one trace, so here a prefix is named by all its ids together. Times of a sub-agent's
requests count from the trace's start, or from the sub-agent's if its first request lies before
that. The main agent's next request waits for all sub-agents before it, except for those whose
status is `async_launched`: they were started and not waited for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from heapq import heappush, merge
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np

from kvkernels import chain_hashes
from policies.contract import Hashes
from simulator.traces.job import NO_IDS, ErrorLog, Job, LineError
from simulator.traces.mooncake import DECODE_ERRORS, OutputTokens, PromptTokens, SessionId
from simulator.traces.session_file import LocalId, Seconds, UnderWay, jobs_before
from simulator.traces.timing import NS

BLOCK_TOKENS = 64
_MAX_REQUESTS = 1_000_000  # of a session, sub-agents' included
_NOT_AWAITED = "async_launched"


class _Call(msgspec.Struct, frozen=True, gc=False):
    """One request of the main agent or a sub-agent."""

    type: Literal["n", "s"]
    t: Seconds
    prompt_tokens: PromptTokens = msgspec.field(name="in")
    output_tokens: OutputTokens = msgspec.field(name="out")
    hash_ids: list[LocalId]
    api_time: Seconds | None = None
    think_time: Seconds | None = None


class _Entry(msgspec.Struct, frozen=True):
    """A request of the main agent, or a sub-agent with its requests."""

    type: Literal["n", "s", "subagent"]
    t: Seconds
    prompt_tokens: PromptTokens | None = msgspec.field(name="in", default=None)
    output_tokens: OutputTokens | None = msgspec.field(name="out", default=None)
    hash_ids: list[LocalId] | None = None
    api_time: Seconds | None = None
    think_time: Seconds | None = None
    agent_id: SessionId | None = None
    status: str = ""
    requests: list[_Call] | None = None


class _Trace(msgspec.Struct, frozen=True):
    id: SessionId
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    hash_id_scope: Literal["local"]
    requests: Annotated[list[_Entry], msgspec.Meta(min_length=1, max_length=_MAX_REQUESTS)]


class _Agent(NamedTuple):
    """The conversation of one agent of a trace. Lifetime: until the trace's last request
    is read.
    """

    name: str
    parent: str | None
    calls: list[_Call]  # times from the trace's start, ascending
    waits_for: dict[int, tuple[str, ...]]  # by the number of the call
    pause_s: float | None  # before the first call, from the parent's answer


def block_size_of(raw: bytes, _: msgspec.Struct) -> int | None:
    """Return the number of tokens for which an id of this line stands, or None if the line does not
    say.
    """
    try:
        return msgspec.json.decode(raw, type=_Trace).block_size
    except DECODE_ERRORS:
        return None


def count_traces(lines: Iterable[tuple[int, bytes]]) -> int:
    """Return the number of lines that are traces."""
    return sum(block_size_of(raw, msgspec.Struct()) is not None for _, raw in lines)


def read_traces(
    lines: Iterable[tuple[int, bytes]],
    errors: ErrorLog,
    starts: Iterator[int],
    block_tokens: int,
    gap_s: float,
) -> Iterator[Job]:
    """Yield the requests of all traces in order of arrival; only traces in progress are held.
    `starts` gives the time in ns at which each trace begins, ascending. Gaps and pauses longer than
    `gap_s` are shortened to it.
    """
    decode = msgspec.json.Decoder(_Trace).decode
    under_way: UnderWay = []
    names: set[str] = set()
    for number, raw in lines:
        try:
            agents = _agents(_checked(decode, raw, block_tokens, names))
        except LineError as error:
            errors.add(number, error)
            continue
        start_ns = next(starts)
        yield from jobs_before(under_way, start_ns)
        jobs = _jobs_of(agents, start_ns, len(names), block_tokens, gap_s)
        first = next(jobs)
        heappush(under_way, (first.at_ns, number, first, jobs))
    if not names:
        raise errors.nothing_read()
    yield from jobs_before(under_way, 1 << 62)


def _arrival(job: Job) -> int:
    return job.at_ns


def _checked(
    decode: Callable[[bytes], _Trace], raw: bytes, block_tokens: int, names: set[str]
) -> _Trace:
    try:
        trace = decode(raw)
    except DECODE_ERRORS as error:
        raise LineError(str(error)) from error
    if trace.block_size != block_tokens:
        raise LineError(f"block_size: {trace.block_size}; expected {block_tokens}, as before it")
    if trace.id in names:
        raise LineError(f"id: {trace.id!r} is the id of an earlier trace")
    for number, entry in enumerate(trace.requests):
        where = f"requests[{number}]"
        if entry.type == "subagent":
            if entry.agent_id is None or not entry.requests:
                raise LineError(f"{where}: a sub-agent needs `agent_id` and `requests`")
            for inner, call in enumerate(entry.requests):
                _check_call(call, f"{where}.requests[{inner}]", block_tokens)
        else:
            _check_call(_call_of(entry, where), where, block_tokens)
    if all(entry.type == "subagent" for entry in trace.requests):
        raise LineError("requests: has no request of a main agent")
    names.add(trace.id)
    return trace


def _call_of(entry: _Entry, where: str) -> _Call:
    if entry.prompt_tokens is None or entry.output_tokens is None or entry.hash_ids is None:
        raise LineError(f"{where}: a request needs `in`, `out` and `hash_ids`")
    return _Call(
        "s" if entry.type == "s" else "n",
        entry.t,
        entry.prompt_tokens,
        entry.output_tokens,
        entry.hash_ids,
        entry.api_time,
        entry.think_time,
    )


def _check_call(call: _Call, where: str, block_tokens: int) -> None:
    full, blocks = call.prompt_tokens // block_tokens, len(call.hash_ids)
    if not full <= blocks <= full + 1:
        raise LineError(
            f"{where}.hash_ids: {blocks} ids; expected {full}, one a full block, or one more"
        )


def _agents(trace: _Trace) -> list[_Agent]:
    """Return the main agent and its sub-agents, each with its calls in order of time."""
    main: list[_Call] = []
    waits_for: dict[int, tuple[str, ...]] = {}
    agents: list[_Agent] = []
    awaited: list[str] = []
    known: dict[str, int] = {}
    for number, entry in enumerate(trace.requests):
        if entry.requests is None or entry.type != "subagent":
            if awaited:
                waits_for[len(main)] = tuple(awaited)
                awaited.clear()
            main.append(_call_of(entry, f"requests[{number}]"))
            continue
        agent_id = entry.agent_id or ""
        known[agent_id] = known.get(agent_id, 0) + 1
        again = f"#{known[agent_id]}" if known[agent_id] > 1 else ""
        name = f"{trace.id}/{agent_id}{again}"
        if entry.status != _NOT_AWAITED:
            awaited.append(name)
        offset_s = entry.t if entry.requests[0].t < entry.t else 0.0
        calls = [msgspec.structs.replace(one, t=one.t + offset_s) for one in entry.requests]
        pause_s = None
        if main and (answer_s := main[-1].api_time) is not None:
            pause_s = max(calls[0].t - main[-1].t - answer_s, 0.0)
        agents.append(_Agent(name, trace.id, _in_order(calls), {}, pause_s))
    return [_Agent(trace.id, None, _in_order(main), waits_for, None), *agents]


def _in_order(calls: list[_Call]) -> list[_Call]:
    """Return the calls with times that never decrease; recorders round times."""
    last_s, ordered = 0.0, []
    for call in calls:
        last_s = max(last_s, call.t)
        ordered.append(msgspec.structs.replace(call, t=last_s))
    return ordered


def _jobs_of(
    agents: list[_Agent], start_ns: int, serial: int, block_tokens: int, gap_s: float
) -> Iterator[Job]:
    """Return all jobs of a trace in order of arrival, after shortening gaps in which the whole
    trace pauses.
    """
    recorded = sorted({call.t for agent in agents for call in agent.calls})
    cut_ns, at_s, last_s = [], 0.0, recorded[0]
    for t in recorded:
        at_s += min(gap_s, t - last_s)
        last_s = t
        cut_ns.append(start_ns + round(at_s * NS))
    times = recorded, cut_ns
    grouped = len(agents) > 1
    each = (_jobs(agent, times, agents[0].name if grouped else None, serial, block_tokens, gap_s)
            for agent in agents)  # fmt: skip
    return merge(*each, key=_arrival)


def _jobs(
    agent: _Agent,
    times: tuple[list[float], list[int]],
    group: str | None,
    serial: int,
    block_tokens: int,
    gap_s: float,
) -> Iterator[Job]:
    recorded, cut_ns = times
    ids = _ids(agent.calls[0], serial)
    for number, call in enumerate(agent.calls):
        more = number + 1 < len(agent.calls)
        following = _ids(agent.calls[number + 1], serial) if more else NO_IDS
        full = call.prompt_tokens // block_tokens
        end = (call.prompt_tokens + call.output_tokens) // block_tokens
        goes_on = len(following) >= full and np.array_equal(following[:full], ids[:full])
        waits_for = agent.waits_for.get(number, ())
        pause_s = call.think_time if number else agent.pause_s
        if waits_for:  # the recorded pause has the sub-agents' time in it
            pause_s = 0.0
        yield Job(
            cut_ns[bisect_right(recorded, call.t) - 1],
            call.prompt_tokens,
            call.output_tokens or 1,
            ids[:full],
            answer_ids=following[full:end] if goes_on else NO_IDS,
            session=agent.name,
            group=group,
            parent=agent.parent,
            think_ns=None if pause_s is None else round(min(gap_s, pause_s) * NS),
            waits_for=waits_for,
        )
        ids = following


def _ids(call: _Call, serial: int) -> Hashes:
    """Return, for each block of a call, the hash of the prefix that ends with it; no other trace
    has these hashes.
    """
    if not call.hash_ids:
        return NO_IDS
    # Ids are below 2^32: as many bits as an int32 has.
    tokens = np.array(call.hash_ids, dtype=np.uint32).view(np.int32)
    return chain_hashes(tokens, 1, serial)
