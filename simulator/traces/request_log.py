"""The router's own request log (`router.record.request_line`) as a workload.

All requests that arrived count: one that was turned away is in the workload like any other. If the
log does not know how long an answer would have been, the mean of the known ones so far is used.
Lines of a model that no worker serves, and of prompts that were never read, are left out. A log
that continues after a restart has several headings, and each part of a recording has one; sessions
and tenants cannot be compared across headings of different salts, and are kept apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from statistics import fmean
from typing import Annotated

import msgspec
import numpy as np

from policies.contract import Hashes
from router.record.request_line import FORMAT, VERSION, FleetPart, hashes_of
from simulator.traces.job import NO_IDS, Job, LineError
from simulator.traces.mooncake import (
    DECODE_ERRORS,
    MAX_OUTPUT_TOKENS,
    MAX_PROMPT_TOKENS,
    SessionId,
)

BLOCK_TOKENS = 16
SLACK_S = 3600  # lines stand in order of the requests' ends
MAX_UNIX_S = 1 << 34
LOOK_AHEAD_JOBS = 1 << 15


class RequestLogOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a request log."""

    model: Annotated[
        str | None,
        msgspec.Meta(description="name of the model whose requests are replayed; default: all"),
    ] = None
    turns: Annotated[
        bool,
        msgspec.Meta(
            description="true: a session's next turn shows what an answer added to caches"
        ),
    ] = True


class _LogLine(msgspec.Struct, frozen=True, gc=False):
    """The fields of a line that a replay needs, and `format`, which only headings have."""

    format: str | None = None
    version: int | None = None
    salt: str = ""
    at: Annotated[float, msgspec.Meta(ge=0, le=MAX_UNIX_S)] | None = None
    model: str | None = None
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROMPT_TOKENS)] | None = None
    output_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_OUTPUT_TOKENS)] | None = None
    cached_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROMPT_TOKENS)] | None = None
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROMPT_TOKENS)] | None = None
    chain: bytes = b""
    session: SessionId | None = None
    tenant: SessionId | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)] = 0
    group: SessionId | None = None
    parent: SessionId | None = None
    final: bool = False


def block_size_of(raw: bytes, options: RequestLogOptions) -> int | None:
    """Return the tokens per block of this line's chain; None if it does not say or was not asked
    for.
    """
    try:
        line = msgspec.json.decode(raw, type=_LogLine)
    except DECODE_ERRORS:
        return None
    return line.block_size if line.chain and options.model in (None, line.model) else None


def parser(block_tokens: int, model: str | None = None) -> Callable[[bytes], Job | None]:
    """Return the function that reads the lines, given in order; it raises `LineError`."""
    decode = msgspec.json.Decoder(_LogLine).decode
    headings = known = known_tokens = 0
    names = "0"  # whose names compare: of headings with one salt, or below one heading

    def named(digest: str | None) -> str | None:
        return None if digest is None else f"{names}/{digest}"

    def parse(raw: bytes) -> Job | None:
        nonlocal headings, known, known_tokens, names
        try:
            line = decode(raw)
            chain = hashes_of(line.chain)
        except (*DECODE_ERRORS, ValueError) as error:
            raise LineError(str(error)) from error
        if line.format is not None:
            headings += 1
            _check_heading(line)
            names = line.salt or f"{headings}"
            return None
        if line.at is None or line.prompt_tokens is None:
            raise LineError(f"{'at' if line.at is None else 'prompt_tokens'}: is missing")
        if not line.prompt_tokens or line.model is None or model not in (None, line.model):
            return None
        _check_chain(line, len(chain), block_tokens)
        if line.output_tokens:
            known, known_tokens = known + 1, known_tokens + line.output_tokens
        return Job(
            round(line.at * 1e6) * 1000,  # a float that counts from 1970 tells no more
            line.prompt_tokens,
            line.output_tokens or (known_tokens // known if known else 1),
            chain,
            session=named(line.session),
            tenant=named(line.tenant),
            priority=line.priority,
            group=named(line.group),
            parent=named(line.parent),
            final=line.final,
            cached_tokens=line.cached_tokens,
        )

    return parse


def continued(jobs: Iterable[Job], block_tokens: int) -> Iterator[Job]:
    """Yield the same jobs, completed with the blocks that later turns of their sessions show.

    A log names only the full blocks of prompts. If a turn of a session begins with all full blocks
    of the one before it and is no shorter, it is taken to begin with all of that prompt, and, if it
    is long enough, with its answer. Then the block in which the earlier prompt ends and the blocks
    that its answer fills get the hashes of the later turn; a block that no later turn names gets a
    hash that its session alone has. A next turn is searched among at least the next
    `LOOK_AHEAD_JOBS` jobs; twice as many jobs are held.
    """
    held: list[Job] = []
    given = 0
    for job in jobs:
        held.append(job)
        if len(held) == 2 * LOOK_AHEAD_JOBS:
            yield from _linked(held, block_tokens, given)[:LOOK_AHEAD_JOBS]
            del held[:LOOK_AHEAD_JOBS]
            given += LOOK_AHEAD_JOBS
    yield from _linked(held, block_tokens, given)


def _linked(jobs: Sequence[Job], block_tokens: int, before: int) -> list[Job]:
    """Return each of the jobs, completed with the blocks that later jobs show. `before` is the
    number of jobs of the log before these.
    """
    linked = list(jobs)
    later: dict[str, tuple[Hashes, int]] = {}  # names of a session's next turn, and its length
    for place in range(len(linked) - 1, -1, -1):
        job = linked[place]
        if job.session is None:
            continue
        ids, tokens = job.ids[: job.prompt_tokens // block_tokens], job.prompt_tokens
        names, reaches = later.get(job.session, (NO_IDS, 0))
        if reaches < tokens or not np.array_equal(names[: len(ids)], ids):
            names, reaches = np.append(ids, _own_name(job.session, before + place)), tokens
        later[job.session] = names, tokens
        ends = tokens + job.output_tokens
        answer = names[len(ids) : -(-ends // block_tokens)] if ends <= reaches else NO_IDS
        linked[place] = msgspec.structs.replace(
            job, ids=names[: -(-tokens // block_tokens)], answer_ids=answer
        )
    return linked


def _own_name(session: str, place: int) -> np.uint64:
    """Return a hash for one block of a session that nothing else has, except by chance."""
    told = blake2b(f"{session}/{place}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(told, "little"))


def _check_heading(line: _LogLine) -> None:
    if line.format != FORMAT or line.version != VERSION:
        raise LineError(
            f"format: {line.format!r} version {line.version}; expected {FORMAT!r} {VERSION}"
        )


def _check_chain(line: _LogLine, blocks: int, block_tokens: int) -> None:
    if not blocks:
        return
    if line.block_size != block_tokens:
        raise LineError(
            f"block_size: {line.block_size}; expected {block_tokens}, as before it; where models "
            "have blocks of different sizes, choose one: --format 'requests?model=NAME'"
        )
    if blocks > (line.prompt_tokens or 0) // block_tokens:
        raise LineError(f"chain: {blocks} blocks for prompt_tokens {line.prompt_tokens}")


class Recorded(msgspec.Struct, frozen=True):
    """The facts that a request log records: the workers, the policies, and the latencies and hits
    of clients. None means not recorded.
    """

    policies: tuple[str, ...]  # specifications of its headings, each once, the last one last
    workers: int | None  # of the last heading
    fleet: tuple[FleetPart, ...]  # of the last heading
    worker_requests: int | None  # the router's limits, of the last heading
    worker_queued_tokens: int | None
    models: dict[str, int]  # requests by model
    requests: int  # of the model asked for, or of the only one
    sessions: int  # that they name
    first_s: float  # arrivals, unix seconds
    last_s: float
    under_last: int  # requests since the last policy took over: what follows is of these
    ttft_ms: float | None  # mean of complete streams
    hit_rate: float | None  # cached tokens / prompt tokens of answers that report both
    cut: bool  # its last line ends in the middle


class _Seen(_LogLine, frozen=True, gc=False):
    """A line of a request log with the fields that clients measured, besides the fields that a
    replay needs.
    """

    policy: str | None = None
    workers: int | None = None
    fleet: tuple[FleetPart, ...] = ()
    worker_requests: int | None = None
    worker_queued_tokens: int | None = None
    error: str | None = None
    ttft_ms: float | None = None
    worker_prompt_tokens: int | None = None


def read_recorded(lines: Iterable[tuple[int, bytes]], model: str | None = None) -> Recorded:
    """Return a summary of what a log's lines record; wrong lines are ignored."""
    decode = msgspec.json.Decoder(_Seen).decode
    headings: dict[str, _Seen] = {}
    models: Counter[str] = Counter()
    own: list[_Seen] = []
    policy, under_others = None, 0  # in force, and how many of `own` ended before it was
    last = b"\n"
    for _, last in lines:
        try:
            line = decode(last)
        except DECODE_ERRORS:
            continue
        if line.format is not None:
            headings.pop(line.policy or "", None)
            headings[line.policy or ""] = line
            if line.policy != policy:
                policy, under_others = line.policy, len(own)
        elif line.at is not None and line.prompt_tokens and line.model is not None:
            models[line.model] += 1
            if model in (None, line.model):
                own.append(msgspec.structs.replace(line, chain=b""))
    heading = list(headings.values())[-1] if headings else _Seen()
    times = [line.at for line in own if line.at is not None]
    measured = own[under_others:]
    streams = [line.ttft_ms for line in measured if line.error is None and line.ttft_ms is not None]
    told = [
        (line.cached_tokens, line.worker_prompt_tokens)
        for line in measured
        if line.cached_tokens is not None and line.worker_prompt_tokens
    ]
    return Recorded(
        policies=tuple(filter(None, headings)),
        workers=heading.workers,
        fleet=heading.fleet,
        worker_requests=heading.worker_requests,
        worker_queued_tokens=heading.worker_queued_tokens,
        models=dict(models),
        requests=len(own),
        sessions=len({line.session for line in own} - {None}),
        first_s=min(times, default=0.0),
        last_s=max(times, default=0.0),
        under_last=len(measured),
        ttft_ms=fmean(streams) if streams else None,
        hit_rate=sum(cached for cached, _ in told) / sum(of for _, of in told) if told else None,
        cut=not last.endswith(b"\n"),
    )
