"""Routers that share what they know: the link, the others, and what went wrong between them."""

from __future__ import annotations

from grafana.panel import Panel, Row, rate, selected

REPLICAS = Row(
    "Replicas (where `state` is set)",
    (
        Panel(
            "Link to Redis",
            "1: it is up. 0: this router goes on with what it knew of the others.",
            "short",
            ((selected("warmroute_replicas_link_up"), "link"),),
            6,
            maximum=1.0,
            alert="WarmrouteReplicaStale",
        ),
        Panel(
            "Stale for, and silence of peers",
            "Stale: how long the link has been down. Peers: time since another router's latest "
            "message; each says something twice a second.",
            "s",
            (
                (selected("warmroute_replicas_stale_seconds"), "stale"),
                (selected("warmroute_replicas_peer_silent_seconds"), "peer {{peer}}"),
            ),
            6,
            alert="WarmrouteReplicaStale",
        ),
        Panel(
            "Other routers, leases",
            "Routers of the fleet besides this one, and leases that this one has, to read for all.",
            "short",
            (
                (selected("warmroute_replicas_peers"), "peers"),
                (selected("warmroute_replicas_leases"), "leases"),
            ),
            6,
        ),
        Panel(
            "Requests of others",
            "Unfinished requests of each other router at workers that this one knows.",
            "short",
            ((selected("warmroute_replicas_peer_requests"), "peer {{peer}}"),),
            6,
            stacked=True,
        ),
        Panel(
            "In step",
            "1: all that another router has at workers is known here. 0: something is missing and "
            "was asked for.",
            "short",
            ((selected("warmroute_replicas_peer_in_step"), "peer {{peer}}"),),
            6,
            maximum=1.0,
            alert="WarmrouteReplicaOutOfStep",
        ),
        Panel(
            "Keys in which others differ",
            "Of the configuration's keys that must be alike. Any: the routers do not decide alike.",
            "short",
            ((selected("warmroute_replicas_disagreements"), "peer {{peer}}"),),
            6,
            alert="WarmrouteReplicasDiffer",
        ),
        Panel(
            "Messages",
            "Between routers: told by this one, heard of others.",
            "suffix: per s",
            ((rate("warmroute_replicas_messages_total", by="direction"), "{{direction}}"),),
            6,
            names=("told", "heard"),
        ),
        Panel(
            "Bytes of messages",
            "Between routers: told by this one, heard of others.",
            "Bps",
            ((rate("warmroute_replicas_bytes_total", by="direction"), "{{direction}}"),),
            6,
            names=("told", "heard"),
        ),
        Panel(
            "Events of one reader",
            "Workers whose KV events one router alone can read: read here, heard of it, unheard.",
            "short",
            ((selected("warmroute_replicas_kv_sources"), "{{from}}"),),
            8,
        ),
        Panel(
            "Batches of these",
            "Between routers; copies: all that is known of a worker's cache.",
            "suffix: per s",
            (
                (rate("warmroute_replicas_kv_batches_total", by="direction"), "{{direction}}"),
                (
                    rate("warmroute_replicas_kv_copies_total", by="direction"),
                    "copies {{direction}}",
                ),
            ),
            8,
        ),
        Panel(
            "What was missed of these",
            "gaps: missed, and asked for; jumps: changes that only a copy tells; refused copies.",
            "suffix: per s",
            ((rate("warmroute_replicas_kv_trouble_total", by="what"), "{{what}}"),),
            8,
        ),
        Panel(
            "What went wrong",
            "gaps in messages, miscounted requests, those at strange workers or beyond the bound, "
            "malformed messages; lapses: a live router that was missing (own, peer). Lost: own "
            "messages. Foreign: entries under our keys. Connects: times the link was up anew.",
            "suffix: per s",
            (
                (rate("warmroute_replicas_trouble_total", by="what"), "{{what}}"),
                (rate("warmroute_replicas_lapses_total", by="whose"), "lapses: {{whose}}"),
                (rate("warmroute_replicas_dropped_messages_total"), "lost"),
                (rate("warmroute_replicas_malformed_total"), "foreign"),
                (rate("warmroute_replicas_connects_total"), "connects"),
            ),
            24,
            names=("gaps", "miscounted", "strange", "beyond", "malformed", "lost", "foreign"),
            alert="WarmrouteReplicaOutOfStep",
        ),
    ),
)
