"""Tests of event streams that only one replica can read: which replica continues, which stops, and
whose cache state is used.
"""

from __future__ import annotations

from router.replicas.messages import KvBatch, KvWanted
from tests.router.core.core_world import chain_of
from tests.router.replicas.kv_fan_world import KvReplicas, Sharer


def fleet(count: int) -> tuple[KvReplicas, Sharer, list[Sharer]]:
    """Return the world after it has settled, the replica that reads, and the other replicas."""
    replicas = KvReplicas(count)
    replicas.settle()
    sharers = list(replicas.sharers.values())
    (reader,) = (one for one in sharers if one.claim.reads)
    return replicas, reader, [one for one in sharers if one is not reader]


def test_a_change_of_reader_needs_no_copy_if_no_events_were_missed() -> None:
    replicas, reader, others = fleet(3)
    replicas.engine.store([0, 1, 2])
    replicas.settle()
    snapshots = [one.claim.subscriber.snapshots for one in others]
    replicas.kill(reader.replica)
    replicas.settle()
    replicas.engine.store([1, 2])
    replicas.settle()
    assert [one.claim.subscriber.snapshots for one in others] == snapshots
    for one in others:
        assert one.kv.exact
        assert one.chains() == sorted(replicas.engine.holds.values())


def test_a_new_reader_that_missed_events_discards_its_old_state() -> None:
    """A replica that missed events and reads next discards its earlier state: the event numbers may
    seem to continue by chance although events in between were missed.
    """
    replicas, reader, (other,) = fleet(2)
    replicas.engine.store([0, 1])
    replicas.settle()
    assert len(other.chains()) == 2
    other.claim.subscriber.behind(replicas.now_s)
    replicas.kill(reader.replica)
    other.replica.inbox.clear()
    for _ in range(12):  # until the dead one's lease ends
        replicas.advance(0.4)
        replicas.update_peers(other.replica)
        replicas.flush(other.replica)
        other.renew_lease(replicas.server)
    assert other.claim.reads
    assert other.chains() == []
    assert not other.kv.known


def test_batches_of_a_reader_with_a_lower_token_are_ignored() -> None:
    replicas, reader, (other,) = fleet(2)
    replicas.engine.store([0, 1])
    reader.read(replicas.engine)
    replicas.flush(reader.replica)
    old = list(other.replica.inbox[reader.replica.name])
    replicas.deliver(other.replica)
    replicas.server.held.clear()
    other.leases.read_replies(*_lease_replies(replicas, other))
    assert other.claim.reads
    token, number = other.claim.election.token, other.claim.subscriber.place[1]
    for payload in old:
        other.replica.sharing.incoming(reader.replica.name, payload, replicas.now_s)
    assert other.claim.reads
    assert (other.claim.election.token, other.claim.subscriber.place[1]) == (token, number)
    replicas.settle()
    assert [one.claim.reads for one in (reader, other)] == [False, True]
    assert reader.chains() == other.chains() == sorted(replicas.engine.holds.values())


def test_a_reader_cut_off_from_redis_reads_until_its_first_gap() -> None:
    replicas, reader, (other,) = fleet(2)
    replicas.cut_link(reader.replica)
    replicas.advance(4.0)
    assert reader.claim.reads, "nobody else may be there to read"
    replicas.engine.store([0, 1])
    reader.read(replicas.engine)
    assert len(reader.chains()) == 2
    replicas.engine.store([2])
    replicas.engine.drop_oldest()  # another client took it
    replicas.engine.store([1])
    reader.read(replicas.engine)
    assert not reader.claim.reads
    replicas.settle()
    assert sum(one.claim.reads for one in (reader, other)) == 1


def test_a_replica_that_ends_stops_reading_even_without_its_link() -> None:
    replicas, reader, (other,) = fleet(2)
    reader.replica.sharing.kv.leave()
    replicas.cut_link(reader.replica)
    assert not reader.claim.reads, "it takes the closed link for Redis being away"
    replicas.settle()
    assert other.claim.reads


def test_a_reader_stops_as_soon_as_it_learns_of_a_greater_token() -> None:
    _, reader, _ = fleet(2)
    token = reader.claim.election.token
    reader.claim.election.outranked(token)
    assert reader.claim.reads, "its own"
    reader.claim.election.outranked(token + 1)
    assert not reader.claim.reads


def test_batches_are_applied_in_order_and_only_from_the_greatest_token() -> None:
    replicas, _, (other,) = fleet(2)
    replicas.engine.store([0, 1])
    ((seq, payload),) = replicas.engine.unread
    heard, now_s = other.claim.subscriber, replicas.now_s
    token, number = heard.place
    for place in ((token - 1, number), (token, number - 1), (token, number + 1)):
        heard.on_message("r@1", KvBatch("w0", *place, seq, 0, 0, 1, payload), now_s)
        assert other.chains() == []
        assert heard.place == (token, number)
    assert not heard.in_sync, "one was missed"
    assert heard.next_request(now_s) == KvWanted("w0", token, number)
    replicas.settle()
    assert len(other.chains()) == 2


def test_a_batch_of_many_pieces_arrives_complete() -> None:
    replicas, reader, (other,) = fleet(2)
    blocks = list(range(8_000))
    replicas.engine.store(blocks)
    assert len(replicas.engine.unread[-1][1]) > 2 * 65_536
    snapshots = other.claim.subscriber.snapshots
    reader.read(replicas.engine)
    replicas.flush(reader.replica)
    replicas.deliver(other.replica)
    assert other.claim.subscriber.snapshots == snapshots
    assert other.chains() == sorted(chain_of(blocks).tolist())


def _lease_replies(replicas: KvReplicas, sharer: Sharer):
    asked, commands = sharer.leases.commands()
    return asked, [replicas.server.run(one) for one in commands], sharer.timers.now_s
