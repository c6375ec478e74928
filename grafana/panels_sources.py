"""Where workers come from: the sources that name them, and what cannot be used of these."""

from __future__ import annotations

from grafana.panel import Panel, Row, rate, selected

SOURCES = Row(
    "Sources of workers",
    (
        Panel(
            "Workers by source",
            "Workers that a source is believed to have. Empty where none is configured.",
            "short",
            ((selected("warmroute_discovery_workers"), "{{source}}"),),
            6,
            alert="WarmrouteDiscoveryDown",
        ),
        Panel(
            "Sources that can be read",
            "1: the source is read and has no trouble. 0: it cannot be read, or names nobody "
            "although it did; its workers are kept.",
            "short",
            ((selected("warmroute_discovery_up"), "{{source}}"),),
            6,
            maximum=1.0,
            alert="WarmrouteDiscoveryDown",
        ),
        Panel(
            "Comings and goings",
            "Workers that joined or left by a source; flaps: back soon after they were lost. Cut "
            "short: removed with requests, at the end of drain_s.",
            "suffix: per s",
            (
                (rate("warmroute_discovery_changes_total", by="change"), "{{change}}"),
                (rate("warmroute_drains_cut_short_total"), "cut short"),
            ),
            6,
            names=("joined", "left", "flaps", "cut short"),
        ),
        Panel(
            "What cannot be used",
            "Entries of sources that are no workers, workers that two sources name differently, "
            "and for how many seconds a source has been silent.",
            "short",
            (
                (f"sum({selected('warmroute_discovery_refused_entries')})", "refused entries"),
                (selected("warmroute_discovery_conflicts"), "conflicts"),
                (f"max({selected('warmroute_discovery_silent_seconds')})", "seconds of silence"),
            ),
            6,
        ),
    ),
)
