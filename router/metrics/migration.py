"""What became of streams whose worker was lost, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_GAP_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class MigrationMetrics:
    """Counts for `router.http.migration`. Lifetime: process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ended = Counter(
            "warmroute_migrations",
            "Streams whose worker failed after they had begun, by result and kind of failure",
            ["result", "reason"],
            registry=registry,
        )
        for result in ("moved", "closed", "unfit", "refused"):  # shown from the beginning
            self._ended.labels(result, "early_close")
        self._stays = Counter(
            "warmroute_migration_unfit",
            "Streams that could not have gone on elsewhere, by reason, if any had to or not",
            ["reason"],
            registry=registry,
        )
        self._stays.labels("moves")
        self._recomputed = Counter(
            "warmroute_migration_recomputed_tokens",
            "Tokens of prompts and answers that were expected to be computed again to go on",
            registry=registry,
        )
        self._gap = Histogram(
            "warmroute_migration_gap_seconds",
            "From the last byte of a lost worker to the first event of the next one",
            buckets=_GAP_SECONDS,
            registry=registry,
        )
        self._kept = Gauge(
            "warmroute_migration_kept_tokens",
            "Token ids kept of streams under way, four bytes each",
            registry=registry,
        )

    def watch(self, kept_tokens: Callable[[], int]) -> None:
        """Show how many ids are kept."""
        self._kept.set_function(kept_tokens)

    def stays(self, reason: str) -> None:
        """See `router.http.migration.told.Told`."""
        self._stays.labels(reason).inc()

    def moved(self, gap_s: float) -> None:
        """See `router.http.migration.told.Told`."""
        self._gap.observe(max(gap_s, 0.0))

    def resent(self, tokens: int) -> None:
        """See `router.http.migration.told.Told`."""
        self._recomputed.inc(tokens)

    def ended(self, result: str, reason: str) -> None:
        """See `router.http.migration.told.Told`."""
        self._ended.labels(result, reason).inc()
