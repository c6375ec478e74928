"""Collectors of the parts around the core: ports, logs, tokens, traces and saved caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.metrics_core import Metric

from engine.wire.memo import PieceMemo
from router.http.messages import GIVEN_UP, REFUSALS
from router.metrics.exposition import counter, counters, gauge, gauges
from router.record.log_files import QueuedLog
from router.server.server import HttpServer
from router.tokens.check import TokenCheck

if TYPE_CHECKING:
    from router.restart.saved_caches import StateKeeper


def server_metrics(server: HttpServer) -> Iterator[Metric]:
    """Yield the metrics of the client port."""
    yield counters(
        "warmroute_server_refusals",
        "Requests and connections that the HTTP server refused or closed, by reason",
        "reason",
        {reason: server.refusals[reason] for reason in (*REFUSALS, *GIVEN_UP)},
    )
    yield counter(
        "warmroute_server_deferred",
        "Connections of addresses whose requests are often refused. The server reads these "
        "connections after other connections",
        server.deferred,
    )
    yield gauge("warmroute_server_connections", "Open connections of clients", server.connections)
    yield gauge(
        "warmroute_server_arriving_bytes",
        "Memory of requests that are still arriving",
        server.held_bytes,
    )


def state_metrics(keeper: StateKeeper | None) -> Iterator[Metric]:
    """Yield the metrics of saved caches; all are 0 if nothing is saved."""
    saves = failed = size_bytes = 0
    age_s = 0.0
    if keeper is not None:
        saves, failed = keeper.saves, keeper.failed_saves
        size_bytes, age_s = keeper.size_bytes, keeper.age_s
    yield counters(
        "warmroute_kv_state_saves",
        "Attempts to save the workers' caches to the file `kv_state`: `written` or `failed`",
        "result",
        {"written": saves, "failed": failed},
    )
    name = "warmroute_kv_state_bytes"
    yield gauge(name, "Size of the file `kv_state`, as last written", size_bytes)
    yield gauge(
        "warmroute_kv_state_age_seconds",
        "Time since the file `kv_state` was last written, or since the start",
        age_s,
    )


def token_metrics(check: TokenCheck, memo: PieceMemo | None) -> Iterator[Metric]:
    """Yield the metrics of the token check, with a series for each checked model, and the metrics
    of the memo of tokenized pieces of text.
    """
    exact = dict(check.exact())
    yield counters(
        "warmroute_tokenizer_mismatch",
        "Prompts and probes whose tokens differ from the worker's",
        "model",
        {model: check.mismatches[model] for model in exact},
    )
    yield gauges(
        "warmroute_tokenizer_exact",
        "1 while the router matches the model's prompts by tokens; 0 while the router matches by "
        "text, because tokens differed",
        "model",
        {model: 1 if trusted else 0 for model, trusted in exact.items()},
    )
    yield counters(
        "warmroute_tokenized_characters",
        "Characters of prompts that the router tokenized (`encoded`), or whose token ids the "
        "router remembered (`reused`)",
        "result",
        {
            "encoded": 0 if memo is None else memo.encoded_chars,
            "reused": 0 if memo is None else memo.reused_chars,
        },
    )
    held = 0 if memo is None else memo.bytes
    yield gauge("warmroute_token_memo_bytes", "Memory of remembered token ids", held)


def log_metrics(of: str, log: QueuedLog[Any] | None) -> Iterator[Metric]:
    """Yield the number of lines of a log; the number is 0 if the router keeps no such log."""
    yield counters(
        f"warmroute_{of}_log_lines",
        f"Lines of the {of} log, `written` or `lost`",
        "result",
        _written(log, "written"),
    )


_PICKER_ENDS = ("placed", "refused", "unasked", "left", "watched", "broken")


def picker_metrics(counts: Mapping[str, int]) -> Iterator[Metric]:
    """Yield the number of requests for which proxies asked the endpoint picker, by outcome. All
    numbers are 0 if the picker is off.
    """
    text = "Unfinished requests about which a gateway has asked the endpoint picker"
    yield gauge("warmroute_picker_streams", text, counts.get("open", 0))
    yield counters(
        "warmroute_picker_requests",
        "Requests about which gateways asked the endpoint picker, by end: `placed`; "
        "`refused` by the router; `unasked` (the gateway answered itself); `left` by "
        "the client; `watched` (the gateway wanted no answer); `broken` by a defect",
        "end",
        {end: counts.get(end, 0) for end in _PICKER_ENDS},
    )
    yield counters(
        "warmroute_picker_elsewhere",
        "Requests that a gateway did not send to the picked worker, but to another "
        "worker (`moved`) or to an address that is no worker (`stranger`)",
        "to",
        {to: counts.get(to, 0) for to in ("moved", "stranger")},
    )


def tracing_metrics(exporter: QueuedLog[Any] | None) -> Iterator[Metric]:
    """Yield the number of exported and lost traces; 0 if tracing is off."""
    yield counters(
        "warmroute_traces",
        "Sampled requests whose spans were `exported` to the collector, or `lost`",
        "result",
        _written(exporter, "exported"),
    )


def _written(log: QueuedLog[Any] | None, name: str) -> dict[str, float]:
    return {name: 0, "lost": 0} if log is None else {name: log.written, "lost": log.lost}
