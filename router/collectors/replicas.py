"""Collectors of the routers that share state with this router, and of the link between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from router.metrics.exposition import counter, counters, gauge, gauges

if TYPE_CHECKING:
    from router.replicas.former import FormerRouters
    from router.replicas.link import Link
    from router.replicas.replica import Replica
    from router.replicas.sharing import Sharing


def replica_metrics(replica: Replica | None) -> Iterator[Metric]:
    """Yield the metrics of the routers that share state with this one. Yield nothing if the router
    shares no state.
    """
    if replica is None:
        return
    yield from _link(replica.link)
    yield from _peers(replica.link, replica.sharing)
    yield from _kv(replica.sharing)


def former_metrics(former: FormerRouters | None) -> Iterator[Metric]:
    """Yield the number of earlier routers (of hot restarts) that have not ended, and the number of
    their requests; both are 0 if there are none.
    """
    count, requests = (0, 0) if former is None else (len(former), former.requests)
    yield gauge(
        "warmroute_former_routers",
        "Routers before this one that have not ended, in a hot restart",
        count,
    )
    yield gauge(
        "warmroute_former_requests",
        "Unfinished requests of the routers before this one, which this router charges to their "
        "workers",
        requests,
    )


def _link(link: Link) -> Iterator[Metric]:
    counts, name = link.counters, "warmroute_replicas"
    yield gauge(f"{name}_link_up", "1: the link to redis is up; 0: it is down", link.up)
    yield gauge(
        f"{name}_stale_seconds",
        "For how long nothing was heard of other routers, for the link is down; 0 while it is up",
        link.stale_s,
    )
    yield counter(f"{name}_connects", "Times that the link was up anew", counts.reconnects)
    yield counters(
        f"{name}_messages",
        "Messages between routers",
        "direction",
        {"sent": counts.sent_messages, "received": counts.received_messages},
    )
    yield counters(
        f"{name}_bytes",
        "Bytes of these",
        "direction",
        {"sent": counts.sent_bytes, "received": counts.received_bytes},
    )
    yield counter(
        f"{name}_dropped_messages",
        "Own messages that were lost with the link, or too long",
        counts.dropped,
    )
    yield counter(
        f"{name}_malformed",
        "What stood under keys of the fleet in redis and is no replica's",
        counts.malformed,
    )
    yield counters(
        f"{name}_lapses",
        "Times that a live router was missing from the registry: this one, or another one",
        "whose",
        {"own": counts.lapses, "peer": link.membership.returned},
    )
    yield gauge(f"{name}_leases", "Leases that this router has", link.leases.held())


def _peers(link: Link, sharing: Sharing) -> Iterator[Metric]:
    peers, name = link.membership.peers, "warmroute_replicas"
    yield gauge(f"{name}_peers", "Other routers that are there", len(peers))
    rows = sharing.rows(link.clock())
    yield gauges(
        f"{name}_peer_silent_seconds",
        "Time since another router's latest message",
        "peer",
        {row.name: max(row.silent_s, 0.0) for row in rows},
    )
    yield gauges(
        f"{name}_peer_requests",
        "Requests of another router at workers that this one knows",
        "peer",
        {row.name: row.requests for row in rows},
    )
    yield gauges(
        f"{name}_peer_in_sync",
        "1: all that another router has at workers is known; 0: not all",
        "peer",
        {row.name: row.in_sync for row in rows},
    )
    differing = link.disagreements.now
    yield gauges(
        f"{name}_disagreements",
        "Keys of the configuration in which another router differs, of those that must agree",
        "peer",
        {peer: len(differing.get(peer, ())) for peer in peers},
    )
    counted = sharing.counters()
    yield counters(
        f"{name}_message_errors",
        "What was wrong with other routers' messages: gaps, miscounted requests, requests at "
        "workers that are not known here or beyond the bound, messages that cannot be read",
        "reason",
        {
            "gap": counted.gaps,
            "miscounted": counted.miscounted,
            "unknown_worker": counted.unknown_workers,
            "beyond_bound": counted.beyond,
            "malformed": sharing.malformed,
        },
    )


def _kv(sharing: Sharing) -> Iterator[Metric]:
    """Yield the metrics of KV events that only one router can read, and of snapshots of events that
    each router reads.
    """
    kv, name = sharing.kv, "warmroute_replicas_kv"
    sent, received = kv.publisher.counters, kv.counters()
    yield gauges(
        f"{name}_sources",
        "Workers whose KV events one router alone can read: read here, heard of it, or not heard",
        "from",
        kv.sources(),
    )
    yield counters(
        f"{name}_batches",
        "Batches of such KV events between routers",
        "direction",
        {"sent": sent.batches, "received": received.batches},
    )
    yield counters(
        f"{name}_snapshots",
        "Times that a router told all that it knows of a worker's cache",
        "direction",
        {
            "sent": sent.snapshots,
            "received": received.snapshots,
            "lent": kv.lender.snapshots,  # of workers that each router subscribes to itself
            "borrowed": kv.borrowed,
        },
    )
    yield counters(
        f"{name}_errors",
        "Such KV events that were missed, changes that only a snapshot tells, snapshots of no use",
        "reason",
        {"gap": received.gaps, "jump": sent.jumps, "refused_snapshot": received.refused},
    )
