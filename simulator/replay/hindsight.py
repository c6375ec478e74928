"""What each worker would really have given, by its engine's true state: for reports only."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from policies.contract import Hashes
from simulator.replay.station import Station


def predicted_ttft_ms(
    workers: Sequence[Station], chain: Hashes, prompt_tokens: int, now_ns: int
) -> list[float]:
    """Predicted time to the first token at each worker, ms; `inf` where it takes no requests.

    Prefill left in its queue and the prompt's own uncached tokens, at the worker's rate for full
    chunks, plus one decode step beside which they run. `chain` covers at least the prompt's full
    blocks. `now_ns` is the replay's time: the request's `dispatched_ns` in `on_dispatch`.
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
