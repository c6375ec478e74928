"""Metrics of streams that continue at another worker."""

from __future__ import annotations

from collections import Counter as Counted
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import Metric

from router.metrics.exposition import counter, counters, gauge
from router.metrics.requests import PlainHistogram

_MIGRATION_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


_RESULTS = {(result, "early_close"): 0 for result in ("moved", "closed", "unfit", "refused")}


class MigrationMetrics:
    """Counts for `router.migration`. Lifetime: process."""

    def __init__(self) -> None:
        self.ended: Counted[tuple[str, str]] = Counted()  # (result, kind of failure)
        self.unfit: Counted[str] = Counted()  # by reason
        self.recomputed_tokens = 0
        self.kept_tokens: Callable[[], int] = int  # token ids of streams under way
        self.gap = PlainHistogram(
            "warmroute_migration_gap_seconds",
            "Time from the last byte of the lost worker to the first event of the next worker",
            _MIGRATION_SECONDS,
        )

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families with their current values."""
        yield counters(
            "warmroute_migrations",
            "Streams whose worker failed after the stream had begun, by kind of failure and "
            "result: `moved`, `closed` (only the end was missing), `unfit` (the stream could not "
            "move) or `refused` (no worker took the rest)",
            "result reason",
            _RESULTS | self.ended,  # shown from the beginning
        )
        yield counters(
            "warmroute_migration_unfit",
            "Streams that could not have moved to another worker, by reason, including streams "
            "that did not need to move",
            "reason",
            {"moves": 0} | self.unfit,
        )
        yield counter(
            "warmroute_migration_recomputed_tokens",
            "Tokens of prompts and answers that workers were expected to compute again "
            "because of migrations",
            self.recomputed_tokens,
        )
        name = "warmroute_migration_kept_tokens"
        yield gauge(
            name,
            "Token ids that the router keeps for unfinished streams, of four bytes each",
            self.kept_tokens(),
        )
        yield from self.gap.collect()
