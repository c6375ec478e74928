"""Shares a decision core's state with its peers: sends them its requests, and receives theirs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from msgspec.structs import astuple

from policies.facts import Fact
from router.core.core import RouterCore
from router.keys.quota import KeyUsage, SharedUse
from router.record.logs import worth_a_line
from router.replicas.kv_events import KvSharing
from router.replicas.messages import decoded
from router.replicas.publisher import Dump, RequestPublisher
from router.replicas.subscriber import (
    Names,
    RequestSubscriber,
    SubscriberCounters,
)

log = logging.getLogger(__name__)

_MAX_PEERS = 256  # peers whose messages are kept apart at once
_REQUEST_S = 0.5  # interval between two requests to a peer for a full report, seconds


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One peer's row in status pages. Times are in seconds."""

    name: str
    requests: int  # of its own, at our workers
    in_sync: bool  # all its requests are known
    silent_s: float  # since its latest message


class Sharing:
    """Turns one decision core's facts into messages for peers, and peers' messages into facts.
    Lifetime: process.

    Peers are named `name@epoch`, so that a restarted router is a different peer. All times are on
    the clock of this process. No method raises an error or waits.
    """

    def __init__(
        self,
        identity: str,
        core: RouterCore,
        report_fact: Callable[[Fact], None],
        uses: SharedUse | None = None,
        dump: Dump | None = None,
    ) -> None:
        """Start without peers. `identity` is this replica's name among peers, `name@epoch`; `uses`
        is the shared use of API keys; `dump` is the `dump` of `KvSharing`.
        """
        self.uses = uses or SharedUse(dict)
        self.identity = identity
        self.on_news: Callable[[], None] = lambda: None
        self.kv = KvSharing(identity, core.workers, report_fact, lambda: self.on_news(), dump)
        self.publisher = core.listener = RequestPublisher(lambda: self.on_news(), self.kv.fetch)
        self.malformed = 0
        self.connected = False
        self._core, self._report_fact = core, report_fact
        self._names = Names(core.workers)
        self._subscribers: dict[str, RequestSubscriber] = {}
        self._gone = SubscriberCounters()  # of peers that are no more
        self._requested_s = float("-inf")

    def joined(self, now_s: float) -> None:
        """Note that the connection to Redis works, perhaps again. All open requests are sent, and
        peers are asked for theirs.
        """
        self.connected = True
        self._requested_s = float("-inf")
        self.publisher.connect()
        self.kv.joined(now_s)

    def parted(self, now_s: float) -> None:
        """Note that the connection to Redis is lost. What is known of peers is kept, although it
        grows old.
        """
        if not self.connected:
            return
        self.connected = False
        self.publisher.disconnect()
        for subscriber in self._subscribers.values():
            subscriber.stale(now_s)
        self.kv.parted(now_s)

    def leave(self) -> None:
        """Note that the last message was sent, because this replica ends."""
        self.kv.leave()

    def outgoing(self, now_s: float) -> bytes | None:
        """Return the next message, or None if there is nothing to send."""
        wants: tuple[str, ...] = ()
        if now_s - self._requested_s >= _REQUEST_S:
            wants = tuple(
                name for name, subscriber in self._subscribers.items() if not subscriber.in_sync
            )
            if wants:
                self._requested_s = now_s
        return self.publisher.message(now_s, wants, self.uses)

    def incoming(self, peer: str, payload: bytes, now_s: float) -> None:
        """Process a peer's message, which may be malformed."""
        subscriber = self._subscribers.get(peer)
        if subscriber is None:
            if len(self._subscribers) >= _MAX_PEERS or peer == self.identity:
                return
            requests = self._core.peer_requests
            subscriber = RequestSubscriber(
                self._names.worker_id, requests.room, requests.numbers, self._report_fact
            )
            self._subscribers[peer] = subscriber
        try:
            message = decoded(payload)
        except ValueError as error:
            subscriber.in_sync = False
            self.kv.missed(peer, now_s)
            self._malformed(peer, error)
            return
        if self.identity in message.wants:
            self.publisher.resend_all()
        gaps = subscriber.counters.gaps
        subscriber.on_message(message, now_s)
        if subscriber.counters.gaps > gaps:
            self.kv.missed(peer, now_s)
        if message.kv:
            self.kv.on_messages(peer, message.kv, now_s)
        if message.used:
            used = [KeyUsage(*astuple(one)) for one in message.used]
            self.uses.on_peer_usage(peer, used, message.retelling != "", now_s)

    def present(self, peers: Collection[str], now_s: float) -> None:
        """Set the peers that are running now; the requests of all other peers are ended."""
        for name in [name for name in self._subscribers if name not in peers]:
            subscriber = self._subscribers.pop(name)
            log.info("replica %s is gone, with %d requests at workers", name, len(subscriber))
            subscriber.end_all(now_s)
            self.uses.drop_peer(name, now_s)
            self._gone.add(subscriber.counters)
        self.kv.present(peers, now_s)

    def rows(self, now_s: float) -> list[PeerRow]:
        """Return a row for each peer, sorted by name."""
        rows = [
            PeerRow(name, len(subscriber), subscriber.in_sync, now_s - subscriber.last_message_s)
            for name, subscriber in self._subscribers.items()
        ]
        return sorted(rows, key=lambda row: row.name)

    def counters(self) -> SubscriberCounters:
        """Return the counts of messages received from all peers so far."""
        total = SubscriberCounters()
        for counters in (
            self._gone,
            *(subscriber.counters for subscriber in self._subscribers.values()),
        ):
            total.add(counters)
        return total

    def _malformed(self, peer: str, error: ValueError) -> None:
        self.malformed += 1
        if worth_a_line(self.malformed):  # a broken peer must not fill the log
            line = "replica %s sent an unreadable message (%d so far): %s"
            log.warning(line, peer, self.malformed, error)
