"""What Prometheus hears of the routers that share state with this one, and of the link to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.replicas.replica import Replica

if TYPE_CHECKING:
    from router.replicas.link import Link
    from router.replicas.sharing import Sharing


class ReplicaCollector(Collector):
    """No families where the router shares nothing. Lifetime: process."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def collect(self) -> Iterable[Metric]:
        """All families, as of now."""
        link, sharing = self._replica.link, self._replica.sharing
        if link is not None and sharing is not None:
            yield from _link(link)
            yield from _peers(link, sharing)
            yield from _kv(sharing)


def _link(link: Link) -> Iterator[Metric]:
    counters = link.counters
    yield GaugeMetricFamily(
        "warmroute_replicas_link_up", "1: the link to redis is up; 0: it is down", value=link.up
    )
    yield GaugeMetricFamily(
        "warmroute_replicas_stale_seconds",
        "For how long nothing was heard of other routers, for the link is down; 0 while it is up",
        value=link.stale_s,
    )
    yield CounterMetricFamily(
        "warmroute_replicas_connects", "Times that the link was up anew", value=counters.reconnects
    )
    for name, text, sent, received in (
        (
            "messages",
            "Messages between routers",
            counters.sent_messages,
            counters.received_messages,
        ),
        ("bytes", "Bytes of these", counters.sent_bytes, counters.received_bytes),
    ):
        family = CounterMetricFamily(f"warmroute_replicas_{name}", text, labels=["direction"])
        family.add_metric(["sent"], sent)
        family.add_metric(["received"], received)
        yield family
    yield CounterMetricFamily(
        "warmroute_replicas_dropped_messages",
        "Own messages that were lost with the link, or too long",
        value=counters.dropped,
    )
    yield CounterMetricFamily(
        "warmroute_replicas_malformed",
        "What stood under keys of the fleet in redis and is no replica's",
        value=counters.malformed,
    )
    lapses = CounterMetricFamily(
        "warmroute_replicas_lapses",
        "Times that a live router was missing from the registry: this one, or another one",
        labels=["whose"],
    )
    lapses.add_metric(["own"], counters.lapses)
    lapses.add_metric(["peer"], link.membership.returned)
    yield lapses
    yield GaugeMetricFamily(
        "warmroute_replicas_leases", "Leases that this router has", value=link.leases.held()
    )


def _peers(link: Link, sharing: Sharing) -> Iterator[Metric]:
    now_s = link.clock()
    yield GaugeMetricFamily(
        "warmroute_replicas_peers", "Other routers that are there", value=len(link.membership.peers)
    )
    age = GaugeMetricFamily(
        "warmroute_replicas_peer_silent_seconds",
        "Time since another router's latest message",
        labels=["peer"],
    )
    requests = GaugeMetricFamily(
        "warmroute_replicas_peer_requests",
        "Requests of another router at workers that this one knows",
        labels=["peer"],
    )
    step = GaugeMetricFamily(
        "warmroute_replicas_peer_in_sync",
        "1: all that another router has at workers is known; 0: not all",
        labels=["peer"],
    )
    for row in sharing.rows(now_s):
        age.add_metric([row.name], max(row.silent_s, 0.0))
        requests.add_metric([row.name], row.requests)
        step.add_metric([row.name], row.in_sync)
    yield from (age, requests, step)
    differing = GaugeMetricFamily(
        "warmroute_replicas_disagreements",
        "Keys of the configuration in which another router differs, of those that must agree",
        labels=["peer"],
    )
    for name in link.membership.peers:
        differing.add_metric([name], len(link.disagreements.now.get(name, ())))
    yield differing
    yield from _heard(sharing)


def _heard(sharing: Sharing) -> Iterator[Metric]:
    counted = sharing.counters()
    errors = CounterMetricFamily(
        "warmroute_replicas_message_errors",
        "What was wrong with other routers' messages: gaps, miscounted requests, requests at "
        "workers that are not known here or beyond the bound, messages that cannot be read",
        labels=["reason"],
    )
    errors.add_metric(["gap"], counted.gaps)
    errors.add_metric(["miscounted"], counted.miscounted)
    errors.add_metric(["unknown_worker"], counted.unknown_workers)
    errors.add_metric(["beyond_bound"], counted.beyond)
    errors.add_metric(["malformed"], sharing.malformed)
    yield errors


def _kv(sharing: Sharing) -> Iterator[Metric]:
    """KV events that one router alone can read, and copies of those that each reads."""
    told, heard = sharing.kv.publisher.counters, sharing.kv.counters()
    sources = GaugeMetricFamily(
        "warmroute_replicas_kv_sources",
        "Workers whose KV events one router alone can read: read here, heard of it, or not heard",
        labels=["from"],
    )
    for kind, count in sharing.kv.sources().items():
        sources.add_metric([kind], count)
    yield sources
    for name, text in (
        ("batches", "Batches of such KV events between routers"),
        ("snapshots", "Times that a router told all that it knows of a worker's cache"),
    ):
        family = CounterMetricFamily(f"warmroute_replicas_kv_{name}", text, labels=["direction"])
        family.add_metric(["sent"], getattr(told, name))
        family.add_metric(["received"], getattr(heard, name))
        if name == "snapshots":  # of workers that each router subscribes to itself
            family.add_metric(["lent"], sharing.kv.lender.snapshots)
            family.add_metric(["borrowed"], sharing.kv.borrowed)
        yield family
    errors = CounterMetricFamily(
        "warmroute_replicas_kv_errors",
        "Such KV events that were missed, changes that only a snapshot tells, snapshots of no use",
        labels=["reason"],
    )
    errors.add_metric(["gap"], heard.gaps)
    errors.add_metric(["jump"], told.jumps)
    errors.add_metric(["refused_snapshot"], heard.refused)
    yield errors
