"""Writes the access log: one JSON line for each inference request, for people and for log
collectors.

The event loop puts a `RequestRecord` into a bounded queue; a thread makes lines of the records and
writes them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from router.record.log_files import LineFile, LineSink, LogFile, QueuedLog, Stdout, opening
from router.record.request_record import CLIENT_LEFT, RequestRecord

_NAME = "access log"
STDOUT = "-"
_WAITING = 16_384
_WAITING_BYTES = 32 << 20
_LINE_BYTES = 1_024  # of a line or its record, roughly
_MODEL_CHARS = 256


class AccessLine(msgspec.Struct, frozen=True):
    """One request's line in the access log. Times are in ms; null means unknown, or that the
    request never reached that step.
    """

    at: float  # arrival, unix seconds
    id: str
    trace: str | None  # of `traceparent` (W3C Trace Context), its trace id
    client: str | None  # address
    tenant: str | None
    path: str
    model: str | None
    stream: bool
    status: int
    finish: str  # ok, rejected, client_left, internal_error, or the worker's kind of error
    code: str | None  # of a refusal
    worker: int | None  # the last one
    prefill_worker: int | None  # that computed the prompt for it; null: it did all itself
    attempts: int
    moved: int  # how often the answer went on at another worker
    bytes_in: int  # of the body
    bytes_out: int
    prompt_tokens: int | None  # as the router counted them
    output_tokens: int | None
    expected_hit_tokens: int | None
    cached_tokens: int | None  # as the worker reported
    wait_ms: float | None  # at the router, to the first dispatch
    prefill_ms: float | None  # of the first leg, to the end of its answer
    ttft_ms: float | None
    total_ms: float
    # Where a rule of names counted: the name asked for, the rule, and the model's revision.
    asked: str | UnsetType | None = UNSET
    rule: str | UnsetType = UNSET
    revision: str | UnsetType | None = UNSET


def line_of(record: RequestRecord, unix_offset_s: float) -> AccessLine:
    """Return the access log's line for a request."""
    arrival, last, prefill, outcomes = record.arrival, record.last, record.prefill, record.outcomes
    status = next((one.status for one in reversed(outcomes) if one.status is not None), None)
    usages = [one.usage for one in outcomes if one.usage is not None]
    cached = usages[-1].cached_tokens if usages else None
    if cached is None and prefill is not None:
        cached = prefill.cached_tokens
    finish, code = "client_left", None
    if (ended := record.last_ended) is not None:
        finish, code = ended.finish, ended.code
    if record.refused is not None:
        status, code = record.refused
        finish = "rejected"
    if record.broke:
        finish = record.broke
    if record.broke == "internal_error" and not status:
        status = 500
    # The worker's status does not describe an answer that it did not end.
    if record.late_status is not None:
        status = record.late_status
    known = arrival is not None and code != "model_not_found"
    prompt = None if arrival is None else arrival.prompt_tokens
    hit = None
    if prompt is not None and last is not None:
        hit = max(prompt - (prefill or last).uncached_tokens, 0)
    streams = arrival is not None and arrival.stream
    events = sum(one.events for one in outcomes)
    begun_s = [one.first_byte_s for one in outcomes if one.first_byte_s is not None]
    return AccessLine(
        at=round(record.began_s + unix_offset_s, 6),
        id=record.id,
        trace=record.trace_id,
        client=record.client,
        tenant=record.tenant,
        path=record.path,
        model=arrival.model[:_MODEL_CHARS] if arrival is not None and known else None,
        stream=streams,
        status=CLIENT_LEFT if status is None else status,
        finish=finish,
        code=code,
        worker=None if last is None else last.worker_id,
        prefill_worker=None if prefill is None else prefill.worker_id,
        attempts=len(record.attempts),
        moved=sum(one.resumable for one in outcomes),
        bytes_in=record.bytes_in,
        bytes_out=max(sum(one.bytes_to_client for one in outcomes), record.written_bytes),
        prompt_tokens=prompt,
        output_tokens=(usages[-1].completion_tokens if usages else None) or events or None,
        expected_hit_tokens=hit,
        cached_tokens=cached,
        wait_ms=ms_since(record.attempts[0].sent_s if record.attempts else None, record.began_s),
        prefill_ms=None if prefill is None else ms_since(prefill.ended_s, prefill.sent_s),
        ttft_ms=ms_since(begun_s[0] if begun_s else None, record.began_s) if streams else None,
        total_ms=ms_since(record.end_s, record.began_s) or 0.0,
        **names_in(record),
    )


def names_in(record: RequestRecord) -> dict[str, Any]:
    """Return the model name that the client asked for, its naming rule and the chosen revision, as
    fields of a log's line; empty if no rule applied.
    """
    name = record.name
    if name is None:
        return {}
    asked = None if name.asked is None else name.asked[:_MODEL_CHARS]
    return {"asked": asked, "rule": name.rule[:_MODEL_CHARS], "revision": name.revision}


def ms_since(at_s: float | None, since_s: float) -> float | None:
    """Return the time from `since_s` to `at_s` in milliseconds, rounded for logs."""
    return None if at_s is None else round(max(at_s - since_s, 0.0) * 1e3, 3)


class AccessLog(QueuedLog[RequestRecord]):
    """The queue and the thread that write the access log. Lifetime: process."""

    def __init__(self, file: LineFile) -> None:
        encode = msgspec.json.Encoder().encode_lines

        def lines(records: Sequence[RequestRecord]) -> bytes:
            offset_s = unix_offset_s()
            return encode([line_of(record, offset_s) for record in records])

        super().__init__(_NAME, LineSink(_NAME, file, lines), _WAITING, _WAITING_BYTES)

    def put(self, record: RequestRecord) -> None:
        """Queue a request's record for the log."""
        self.queue(record, _LINE_BYTES)


def unix_offset_s() -> float:
    """Return the difference between Unix time and the router's monotonic clock now. It may change
    later, because the machine's date may be corrected while the router runs.
    """
    return time.time() - time.monotonic()


def access_log(where: str, limit_bytes: int) -> AccessLog:
    """Return an access log that writes to a file, or with `STDOUT` to standard output. Raises
    OSError if the file cannot be opened.
    """
    if where == STDOUT:
        return AccessLog(Stdout())
    path = Path(where)
    with opening("access_log", path):
        return AccessLog(LogFile(path, limit_bytes))
