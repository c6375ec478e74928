"""Writes the request log that a router would have written during a replay, line by line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from policies.contract import Hashes
from policies.load import load
from router.core.contract.actions import Decision
from router.record.request_line import (
    Best,
    FleetPart,
    Header,
    RequestLine,
    chain_bytes,
    pseudonym,
)
from simulator.replay.result import NEVER, Book, ReplayResult, Verdict
from simulator.replay.run import replay
from simulator.replay.setup import Setup
from simulator.replay.station import Station
from simulator.traces.job import Job

STARTED_S = 1_764_000_000.0
MODEL = "m"
KEY = b"of tests"
_encode = msgspec.json.Encoder().encode


class RequestLogger:
    """Watches a replay and writes a line when a request ends. Lifetime: replay."""

    def __init__(self, file: BinaryIO, setup: Setup, started_s: float) -> None:
        self._file, self._setup, self._started_s = file, setup, started_s
        self._under_way: dict[int, tuple[Job, Hashes, Decision, int]] = {}

    def on_start(self, book: Book) -> None:
        self._book = book

    def on_dispatch(
        self, row: int, job: Job, chain: Hashes, decision: Decision, workers: Sequence[Station]
    ) -> None:
        size = workers[0].facts.block_size
        if not self._file.tell():
            self._file.write(_encode(self._header(workers)) + b"\n")
        self._under_way[row] = (job, chain[: job.prompt_tokens // size], decision, size)

    def on_sample(self, now_ns: int, workers: Sequence[Station]) -> None:
        pass

    def _header(self, workers: Sequence[Station]) -> Header:
        size, groups = workers[0].facts.block_size, self._setup.groups
        parts = tuple(
            FleetPart(
                group.count,
                size,
                round(workers[0].facts.kv_capacity_tokens),
                group.role,
                group.max_requests,
                group.max_queued_tokens,
                group.max_kv_fraction,
            )
            for group in groups
        )
        policy = load(self._setup.policy).spec
        return Header(self._started_s, policy, len(workers), fleet=parts)

    def on_end(self, row: int) -> None:
        if row not in self._under_way:  # it was never sent: of no use to these tests
            return
        book, (job, chain, decision, size) = self._book, self._under_way.pop(row)
        arrival, first, finish = book.arrival_ns[row], book.first_token_ns[row], book.finish_ns[row]
        done = book.verdict[row] == Verdict.COMPLETED
        hit = book.hit_tokens[row]
        line = RequestLine(
            at=round(self._started_s + arrival / 1e9, 6),
            model=MODEL,
            prompt_tokens=job.prompt_tokens,
            output_tokens=job.output_tokens,
            cached_tokens=None if hit == NEVER else int(hit),
            block_size=size,
            chain=chain_bytes(chain),
            session=pseudonym(job.session, KEY),
            tenant=pseudonym(job.tenant, KEY),
            group=pseudonym(job.group, KEY) or msgspec.UNSET,
            parent=pseudonym(job.parent, KEY) or msgspec.UNSET,
            final=job.final or msgspec.UNSET,
            priority=job.priority,
            approximate=False,
            stream=True,
            worker=int(book.worker[row]),
            policy=decision.policy,
            reason=decision.reason,
            hit_tokens=decision.hit_tokens,
            attempts=int(book.attempts[row]),
            status=200 if done else 503,
            error=None if done else "error_status",
            ttft_ms=None if first == NEVER else round((first - arrival) / 1e6, 3),
            e2e_ms=0.0 if finish == NEVER else round((finish - arrival) / 1e6, 3),
            candidates=tuple(Best(c.worker_id, None, c.hit_tokens) for c in decision.candidates),
            worker_prompt_tokens=job.prompt_tokens,
        )
        self._file.write(_encode(line) + b"\n")


def log_of(setup: Setup, path: Path, started_s: float = STARTED_S) -> ReplayResult:
    """Replay the set-up, and write the request log to `path`."""
    with path.open("wb") as file:
        return replay(setup, observers=[RequestLogger(file, setup, started_s)])
