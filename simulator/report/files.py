"""The files that replays write: the JSON report, and the CSV with one line for every request."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

import msgspec

from policies.contract import Hashes
from router.core.contract.actions import Decision, regret_hit_tokens, regret_s
from simulator.replay.result import NEVER, Book, Verdict
from simulator.replay.station import Station
from simulator.report.figures import Aggregate, aggregate
from simulator.report.row import ReplayRow
from simulator.traces.job import Job

FORMAT: Literal["warmroute-replay"] = "warmroute-replay"
VERSION: Literal[1] = 1


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole JSON report of replays, as docs/reference/reports.md describes it.

    `version` grows when a field changes.
    """

    format: Literal["warmroute-replay"]
    version: Literal[1]
    about: dict[str, Any]
    results: tuple[ReplayRow, ...]
    policies: tuple[Aggregate, ...]


def encode(rows: Sequence[ReplayRow], about: Mapping[str, Any]) -> bytes:
    """Return the bytes of the JSON report; equal `rows` and `about` give equal bytes."""
    report = Report(FORMAT, VERSION, dict(about), tuple(rows), aggregate(rows))
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def write_json(path: Path, rows: Sequence[ReplayRow], about: Mapping[str, Any]) -> None:
    """Write the JSON report to `path`.

    `about` holds whatever else is worth keeping and msgspec can encode, such as set-up and version.
    """
    path.write_bytes(encode(rows, about))


def predicted_ttft_ms(
    workers: Sequence[Station], chain: Hashes, prompt_tokens: int, now_ns: int
) -> list[float]:
    """Return the predicted time to first token at each worker in ms; `inf` if it takes no requests.

    The prediction is the prefill left in the worker's queue plus the prompt's own uncached tokens,
    at the worker's rate for full chunks, plus one decode step that runs in the same batch. `chain`
    covers at least the prompt's full blocks. `now_ns` is the replay's time: the request's
    `dispatched_ns` in `on_dispatch`.
    """
    return [_predicted_ms(station, chain, prompt_tokens, now_ns) for station in workers]


def _predicted_ms(station: Station, chain: Hashes, prompt_tokens: int, now_ns: int) -> float:
    if not station.alive or station.hung or station.draining or not station.followed:
        return inf
    engine, size = station.engine, station.facts.block_size
    now_ns = station.local_ns(now_ns)
    stats = engine.stats(now_ns)
    blocks = engine.hit_blocks(chain[: (prompt_tokens - 1) // size])
    new_tokens = engine.queued_tokens(now_ns) + prompt_tokens - blocks * size
    step_s = station.step_time.decode_step_s(stats.running, stats.used_blocks * size)
    return (step_s + station.step_time.prefill_s(new_tokens)) / station.speed * 1e3


CANDIDATES = 3  # that a decision keeps, the chosen one first
COLUMNS = (
    *("serial", "session", "arrival_s", "prompt_tokens", "output_tokens", "worker", "attempts"),
    *("verdict", "code", "expected_hit_tokens", "hit_tokens", "ttft_ms", "tpot_ms", "e2e_ms"),
    *("chosen", "second", "third", "best_worker", "loss_ms"),
    *("policy", "reason", "standing", "sent_ms", "regret_ms", "regret_hit_tokens"),
    *("chosen_terms", "second_terms", "chosen_columns", "second_columns"),
    *("group", "parent"),
)
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


class _Sent(NamedTuple):
    """A request in progress, with the CSV cells that were known at its dispatch.
    Lifetime: request.
    """

    session: str
    of: tuple[str, str]  # its group and its parent
    cells: Sequence[str]
    decision: Decision | None


_NEVER_SENT = _Sent("", ("", ""), ("",) * (CANDIDATES + 2), None)


class RequestsCsv:
    """Watches a replay and writes one CSV line for each request to `stream`.

    `stream` must have been opened with `newline=""`. Lines are written as requests end; `serial`
    counts arrivals, so sort by it if order matters. Only requests under way are kept in memory.

    Cells: `chosen`, `second` and `third` are `worker:cost:hit tokens` as the router saw them at the
    last dispatch, with the cost in the policy's own unit. `best_worker` is the worker with the
    lowest predicted TTFT by its engine's true state, and `loss_ms` is how much longer the chosen
    worker's is (`simulator.report.files`). `sent_ms` is the time from arrival to the last dispatch.
    Regrets are against `second`, the runner-up (`router.core.contract.actions`). Terms and columns
    are `name=value;...` as the policy gave and saw them. Missing values are empty.

    `hindsight=False` leaves out `best_worker` and `loss_ms`, which cost a look at every worker per
    request. After `most_lines` lines, further requests are not written. Lifetime: replay.
    """

    reads_details = True

    def __init__(
        self, stream: TextIO, hindsight: bool = True, most_lines: int | None = None
    ) -> None:
        self._writer = csv.writer(stream, lineterminator="\n")
        self._writer.writerow(COLUMNS)
        self._hindsight = hindsight
        self._remaining_lines = most_lines
        self._under_way: dict[int, _Sent] = {}  # by row

    def on_start(self, book: Book) -> None:
        """Keep the replay's table of requests, from which the cells are read."""
        self._book = book

    def on_dispatch(
        self, row: int, job: Job, chain: Hashes, decision: Decision, workers: Sequence[Station]
    ) -> None:
        """Keep the reasons for this dispatch until the request ends or is dispatched again."""
        cells = [f"{c.worker_id}:{c.cost:.6g}:{c.hit_tokens}" for c in decision.candidates]
        cells = (cells + [""] * CANDIDATES)[:CANDIDATES]
        if self._hindsight:
            sent_ns = self._book.dispatched_ns[row]
            times = predicted_ttft_ms(workers, chain, job.prompt_tokens, sent_ns)
            cells += _loss(times, self._book.worker[row])
        else:
            cells += ["", ""]
        self._under_way[row] = _Sent(
            _text(job.session or ""),
            (_text(job.group or ""), _text(job.parent or "")),
            cells,
            decision,
        )

    def on_sample(self, now_ns: int, workers: Sequence[Station]) -> None:
        """Do nothing: a sample of the workers concerns no single request."""

    def on_end(self, row: int) -> None:
        """Write the CSV line of a request that has ended."""
        book = self._book
        sent = self._under_way.pop(row, _NEVER_SENT)
        if self._remaining_lines is not None:
            if not self._remaining_lines:
                return
            self._remaining_lines -= 1
        arrival, first, finish = book.arrival_ns[row], book.first_token_ns[row], book.finish_ns[row]
        output = book.output_tokens[row]
        self._writer.writerow(
            (
                row,
                sent.session,
                f"{arrival / 1e9:.6f}",
                book.prompt_tokens[row],
                output,
                _unless_never(book.worker[row]),
                book.attempts[row],
                Verdict(book.verdict[row]).name.lower(),
                book.code_of(row),
                book.expected_hit_tokens[row],
                _unless_never(book.hit_tokens[row]),
                _span_ms(arrival, first),
                _span_ms(first, finish, output - 1) if output > 1 else "",
                _span_ms(arrival, finish),
                *sent.cells,
                *_reasons(sent.decision, book, row),
                *sent.of,
            )
        )


def _reasons(decision: Decision | None, book: Book, row: int) -> list[object]:
    """Return the last ten cells of a line: policy, reason, regrets, terms and columns."""
    if decision is None:
        return [""] * 10
    sent_ns, first_ns = book.dispatched_ns[row], book.first_token_ns[row]
    waited_s = None if NEVER in (sent_ns, first_ns) else (first_ns - sent_ns) / 1e9
    hit_tokens = book.hit_tokens[row]
    lost_s = regret_s(decision, waited_s)
    lost_tokens = regret_hit_tokens(decision, None if hit_tokens == NEVER else hit_tokens)
    details = decision.details
    best = () if details is None else details.seen[:2]
    cells: list[object] = [
        decision.policy,
        decision.reason,
        "" if details is None else details.request["standing"],
        _span_ms(book.arrival_ns[row], sent_ns),
        "" if lost_s is None else f"{lost_s * 1e3:.3f}",
        "" if lost_tokens is None else lost_tokens,
    ]
    cells += ([_pairs(one.terms) for one in best] + ["", ""])[:2]
    cells += ([_pairs(one.columns) for one in best] + ["", ""])[:2]
    return cells


def _pairs(values: Mapping[str, float]) -> str:
    """Return `name=value;...`, without the values that are NaN (unknown)."""
    known = ((name, value) for name, value in values.items() if not math.isnan(value))
    return _text(";".join(f"{name}={value:.6g}" for name, value in known))


def _loss(times_ms: Sequence[float], chosen: int) -> list[str]:
    """Return the best worker, and how many ms longer the chosen worker takes. If the chosen worker
    is as good as the best one, the chosen worker is returned.
    """
    best_ms = min(times_ms)
    best = chosen if times_ms[chosen] == best_ms else times_ms.index(best_ms)
    lost_ms = 0.0 if best == chosen else times_ms[chosen] - best_ms
    return [str(best), f"{lost_ms:.3f}"]


def _span_ms(begin_ns: int, end_ns: int, parts: int = 1) -> str:
    return "" if NEVER in (begin_ns, end_ns) else f"{(end_ns - begin_ns) / parts / 1e6:.3f}"


def _unless_never(value: int) -> int | str:
    return "" if value == NEVER else value


def _text(text: str) -> str:
    """Return a name from a trace so that no spreadsheet takes it for a formula.

    Source: OWASP, "CSV Injection".
    """
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text
