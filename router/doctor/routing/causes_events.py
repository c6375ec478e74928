"""Diagnoses causes between an engine's KV events and the router: the events are off, not read, sent
to another address, or missed.
"""

from __future__ import annotations

import re

from router.doctor.routing.facts import ExaminedWorker, PoolFacts
from router.doctor.routing.findings import Figure, RoutingVerdict, named

_MIN_REQUESTS = 3  # after so many requests, missing events are a finding
_ENABLE_EVENTS = {  # by kind of engine: how its events are switched on
    "vllm": 'start the engine with --kv-events-config \'{"enable_kv_cache_events":true,'
    '"publisher":"zmq","endpoint":"tcp://*:5557"}\'',
    "sglang": "start the engine with --kv-events-config "
    '\'{"publisher":"zmq","endpoint":"tcp://*:5557"}\'',
    "trtllm": "give the engine kv_cache_config.event_buffer_max_size: 16384",
}
_WORKERS_SOURCE = "GET /workers"
_ENGINE_SOURCE = "the engine's /kv_event_sources"
_EVENTS_METRIC = "warmroute_kv_events_total"


def events_off(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose an engine that publishes no KV events."""
    found = [
        one
        for one in facts.serving()
        if one.row.kind in _ENABLE_EVENTS
        and one.row.events is None
        and not one.engine.trouble
        and not one.engine.endpoints
        and one.engine.prefix_caching is not False
    ]
    if not found:
        return None
    figures = [Figure("publishers that the engine names: 0", _ENGINE_SOURCE)]
    if not facts.alone:
        figures.insert(0, Figure("the router reads events: no", _WORKERS_SOURCE))
    return RoutingVerdict(
        "The engine publishes no KV events, so a router can only guess what its cache holds.",
        tuple(figures),
        _ENABLE_EVENTS[found[0].row.kind],
        facts.weight(found),
        named(found),
    )


def events_not_read(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose an engine whose KV events the router does not read."""
    serving = () if facts.alone else facts.serving()
    found = [one for one in serving if one.row.events is None and one.engine.endpoints]
    if not found:
        return None
    first = found[0]
    strange = "not its own host" in (first.row.advice or "")
    figures = [
        Figure("the router reads events: no", _WORKERS_SOURCE),
        Figure(f"the engine publishes at {_endpoint(first)}", _ENGINE_SOURCE),
    ]
    wrong = "The engine publishes KV events, but the worker's line has events=none."
    change = "take events=none out of the worker's line"
    if strange:
        wrong = "The engine names an address at another host for its KV events; it is not read."
        change = (
            "event_hosts: [HOST] in the router's configuration, or events=ADDRESS for the worker"
        )
        figures.append(Figure(f"advice: {first.row.advice}", _WORKERS_SOURCE))
    return RoutingVerdict(wrong, tuple(figures), change, facts.weight(found), named(found))


def events_elsewhere(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose a router that listens at an address where this engine's events do not arrive."""
    found = [
        one
        for one in facts.serving()
        if _gets_no_events(facts, one) or _reads_wrong_publisher(facts, one)
    ]
    if not found:
        return None
    first = found[0]
    figures = [
        Figure(f"the router listens at {first.row.events}", _WORKERS_SOURCE),
        Figure(
            f"batches of events that came by themselves: {_live_batches(first):.0f}", _EVENTS_METRIC
        ),
        Figure(
            f"requests sent there: {len(facts.of(first))}; blocks known: "
            f"{first.row.resident_blocks}",
            "GET /explain, /workers",
        ),
    ]
    change = "events=tcp://HOST:PORT of the worker, as the engine publishes; open the port to us"
    wrong = "No KV event arrives from the address where the router listens for them."
    if _other_port(first):
        figures.insert(1, Figure(f"the engine publishes at {_endpoint(first)}", _ENGINE_SOURCE))
        change = f"events={_endpoint(first)} in the worker's line, or no events= at all"
        wrong = "The router listens for KV events at another port than the engine's."
    if first.row.events_from not in (None, "read here"):
        figures.append(Figure(f"events_from: {first.row.events_from}", _WORKERS_SOURCE))
    return RoutingVerdict(wrong, tuple(figures), change, facts.weight(found), named(found))


def block_sizes(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose a router that counts blocks of another size than the engine."""
    found = [one for one in facts.serving() if _missized(one)]
    if not found:
        return None
    row = found[0].row
    skipped = row.events_skipped.get("other_block_size", 0)
    own = found[0].engine.settings.get("block_size", "nothing")
    figures = [
        Figure(f"block_size of the worker's line or page: {row.told_block_size}", _WORKERS_SOURCE),
        Figure(f"block_size {own}", "the engine's own settings"),
        Figure(f"events skipped for their block size: {skipped}", _WORKERS_SOURCE),
    ]
    if row.advice:
        figures.append(Figure(f"advice: {row.advice}", _WORKERS_SOURCE))
    return RoutingVerdict(
        "The router was told another size of blocks than the engine's.",
        tuple(figures),
        "take block_size= out of the worker's line: the engine tells its own",
        facts.weight(found),
        named(found),
    )


def events_missed(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose KV events that were lost and not replayed, so that the cache is known only in
    part.
    """
    if not facts.low:
        return None
    found = [
        one
        for one in facts.serving()
        if one.row.events is not None
        and not one.row.kv_known
        and one.events.get("batches", 0)
        and one.events.get("gaps", 0) + one.events.get("disconnects", 0)
    ]
    if not found:
        return None
    kinds = ("gaps", "disconnects", "replays", "snapshots", "failed_syncs")
    counts = ", ".join(f"{kind} {found[0].events.get(kind, 0):.0f}" for kind in kinds)
    return RoutingVerdict(
        "KV events were lost and nobody sent them again, so the router knows a part of the cache.",
        (Figure("kv_known: false", _WORKERS_SOURCE), Figure(counts, _EVENTS_METRIC)),
        'replay_endpoint in the engine\'s --kv-events-config ("tcp://*:5657"), replay= for the '
        "worker before vLLM 0.31",
        facts.weight(found),
        named(found),
    )


def refuted(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose a worker whose answers report fewer cached tokens than its KV events promise."""
    found = [
        one
        for one in facts.serving()
        if (one.row.hit_confidence or 0.0) < 0.9
        and one.row.hit_confidence is not None
        and one.row.events is not None
    ]
    if not found:
        return None
    first = found[0]
    rows = [one for one in facts.of(first) if one.cached_tokens is not None]
    expected = sum(one.expected_hit_tokens for one in rows)
    cached = sum(one.cached_tokens or 0 for one in rows)
    return RoutingVerdict(
        "The engine's answers find less in its cache than its KV events promise.",
        (
            Figure(f"hit_confidence {first.row.hit_confidence:g}", _WORKERS_SOURCE),
            Figure(f"expected {expected:,} tokens, found {cached:,}", "GET /explain"),
        ),
        "events= of the worker: are they this engine's and no other's? else events=none",
        facts.weight(found),
        named(found),
    )


def _gets_no_events(facts: PoolFacts, one: ExaminedWorker) -> bool:
    """Return whether a worker computed new blocks of prompts, but the router got no KV event about
    any of them.
    """
    if one.row.events is None or one.engine.prefix_caching is False:
        return False
    if _severed(one):
        return True
    size = max(one.row.block_size, 1)
    new = [r for r in facts.of(one) if r.prompt_tokens - (r.cached_tokens or 0) > size]
    return len(new) >= _MIN_REQUESTS and not _live_batches(one)


def _live_batches(one: ExaminedWorker) -> float:
    """Return the number of batches of KV events that came live, not as a snapshot."""
    return max(one.events.get("batches", 0) - one.events.get("snapshots", 0), 0)


def _severed(one: ExaminedWorker) -> bool:
    return "connection" in (one.row.events_from or "")


def _reads_wrong_publisher(facts: PoolFacts, one: ExaminedWorker) -> bool:
    """Return whether a worker's answers contradict its KV events because the router reads the
    events from a port of another engine.
    """
    if not _other_port(one) or len(facts.of(one)) < _MIN_REQUESTS:
        return False
    rows = [r for r in facts.of(one) if r.cached_tokens is not None]
    expected = sum(r.expected_hit_tokens for r in rows)
    cached = sum(r.cached_tokens or 0 for r in rows)
    return abs(expected - cached) > 0.1 * max(sum(r.prompt_tokens for r in rows), 1)


def _other_port(one: ExaminedWorker) -> bool:
    read, told = _port(one.row.events or ""), _port(_endpoint(one))
    return read is not None and told is not None and read != told


def _endpoint(one: ExaminedWorker) -> str:
    """Return the address at which the engine publishes the KV events of the worker's rank, or "" if
    it is unknown.
    """
    endpoints = one.engine.endpoints or {}
    return endpoints.get(one.row.rank or 0, "")


def _port(endpoint: str) -> str | None:
    found = re.fullmatch(r"tcp://.*:(\d+)", endpoint)
    return None if found is None else found[1]


def _missized(one: ExaminedWorker) -> bool:
    """Return whether the KV events have another block size than the router can use, or than the
    operator configured.
    """
    row = one.row
    if row.events is None:
        return False
    useless = row.mirrored == "sizes" or row.events_skipped.get("other_block_size", 0) > 0
    own = one.engine.settings.get("block_size")
    said = None if row.told_block_size is None else str(row.told_block_size)
    return useless or (own is not None and said is not None and own not in (said, "None"))
