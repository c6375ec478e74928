"""Tests of a worker's event stream over real ZMQ sockets: gaps, both forms of replays, snapshots,
floods.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from engine.wire.events import BlockStored, encode_batch, live_frames, replay_end, replay_frames
from policies.facts import KvEvents
from router.events import resync as asking_module
from router.events import resync as missed_module
from tests.router.core.core_world import BLOCK, names_of, stored, tokens_of
from tests.router.events.feed_support import (
    DEADLINE_S,
    Answer,
    Publisher,
    feed_line,
    in_five_frames,
    in_four_frames,
    payload,
    until,
    wire,
    with_garbage,
    without_answer,
    without_end,
)


@pytest.mark.parametrize("answer", [in_five_frames, in_four_frames])
async def test_a_late_joiner_without_snapshots_replays_from_the_beginning(answer: Answer) -> None:
    async with feed_line(answer, published=5) as one:
        await one.settled()
        assert one.publisher.replays[0] == 0


@pytest.mark.parametrize("snapshot", [False, True])
async def test_batches_published_before_the_subscription_took_effect_are_requested(
    snapshot: bool,
) -> None:
    """Events that were published before the subscription took effect are requested: no further
    batch would show the gap, because the worker may be idle for hours.
    """
    async with feed_line(snapshot=snapshot, subscribed_s=0.3) as one:
        await until(lambda: bool(one.told), "the first answer")
        await one.publisher.publish(lost=True)
        await one.settled()
        assert one.holds(0)


@pytest.mark.parametrize("answer", [in_five_frames, in_four_frames])
async def test_a_gap_is_filled_by_a_replay(answer: Answer) -> None:
    async with feed_line(answer) as one:
        await one.subscribed()
        await one.settled()
        missed = one.publisher.next_seq
        for lost in (True, True, False):
            await one.publisher.publish(lost)
        await one.settled()
        # One batch that we would know again, or everything where that was about to be asked.
        assert one.publisher.replays[-1] in (missed - 1, 0)
        assert one.kv.counters.gaps >= 1


async def test_a_late_joiner_takes_the_snapshot_if_there_is_one() -> None:
    async with feed_line(snapshot=True, published=5) as one:
        await one.settled()
        assert one.publisher.replays == []
        assert one.feed.counters.snapshots == 1
        await one.subscribed()
        await one.settled()


@pytest.mark.parametrize("answer", [with_garbage, without_answer])
async def test_a_snapshot_replaces_a_failed_replay(answer: Answer) -> None:
    async with feed_line(answer, snapshot=True) as one:
        await one.subscribed()
        await one.settled()
        deadline_s = time.monotonic() + DEADLINE_S
        while not one.publisher.replays:  # a snapshot that is under way may mend the first gap
            assert time.monotonic() < deadline_s
            for lost in (True, False):
                await one.publisher.publish(lost)
            await asyncio.sleep(0.05)
        await one.settled()
        assert one.publisher.snapshots >= 2
        garbage = one.feed.counters.malformed_frames
        assert 1 <= garbage <= len(one.publisher.replays) if answer is with_garbage else not garbage


async def test_without_replay_socket_a_gap_takes_a_snapshot() -> None:
    async with feed_line(replay=False, snapshot=True) as one:
        await one.subscribed()
        for lost in (True, False):
            await one.publisher.publish(lost)
        await one.settled()


async def test_without_a_replay_or_snapshot_hits_stay_a_lower_bound() -> None:
    async with feed_line(replay=False) as one:
        await one.subscribed()
        for lost in (True, False):
            await one.publisher.publish(lost)
        last = one.publisher.next_seq - 1
        await until(lambda: one.holds(last), "what came after the gap")
        assert not one.kv.known
        assert not one.holds(last - 1)


async def test_an_endless_replay_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(asking_module, "_REPLAY_MAX_S", 0.3)
    async with feed_line(without_end, published=3) as one:
        await until(lambda: one.feed.counters.failed_syncs >= 1, "the replay to be given up")
        assert "missed events are not to be had: no usable answer at tcp://" in caplog.text
        assert not one.kv.resyncing
        await one.subscribed()


async def test_a_failed_snapshot_request_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(missed_module, "_ASK_AGAIN_S", 0.05)
    async with feed_line(replay=False, snapshot=True, published=4) as one:
        refusals = iter(range(3))

        def busy(real=one.publisher.snapshot) -> bytes:
            return b"not yet" if next(refusals, None) is not None else real()

        one.publisher.snapshot = busy  # type: ignore[method-assign]
        await one.settled()
        assert one.feed.counters.failed_syncs >= 1


async def test_a_gap_during_another_replay_is_still_filled() -> None:
    """A gap that appears during another replay is not given up at the end of that replay."""
    release = asyncio.Event()

    async def slowly(publisher: Publisher, identity: bytes, start: int) -> None:
        known = publisher.next_seq  # what comes while it waits is not in this replay
        await release.wait()
        for seq in range(start, known):
            await publisher.router.send_multipart(replay_frames(identity, "", seq, payload(seq)))
        await publisher.router.send_multipart(replay_end(identity))

    async with feed_line(slowly, timeout_s=5.0) as one:
        await one.subscribed()  # the first replay is under way
        for lost in (True, False):
            await one.publisher.publish(lost)
        newest = one.publisher.next_seq - 1
        await until(
            lambda: any(isinstance(f, KvEvents) and f.seq == newest for f in one.told), "the gap"
        )
        release.set()
        await one.settled()


async def test_a_restarted_publisher_is_followed_from_its_first_batch() -> None:
    async with feed_line() as one:
        await one.subscribed()
        await one.publisher.publish()
        await one.settled()
        one.publisher.next_seq = 0
        one.publisher.others[0] = encode_batch(9.0, [wire(stored([0]))])  # of another time
        await one.publisher.publish()
        await until(lambda: one.kv.counters.restarts == 1, "the restart to be seen")
        assert one.kv.known
        assert one.kv.resident_blocks == 1


async def test_malformed_frames_are_counted_and_the_stream_continues() -> None:
    async with feed_line() as one:
        await one.subscribed()
        seq = one.publisher.next_seq.to_bytes(8, "big")
        odd = [[b""], [b"", b"x", b"y"], [b"", seq, b"\xc1"], [b"", seq, b""], [b"\xff", seq, b""]]
        for frames in odd:
            await one.publisher.pub.send_multipart(frames)
        await one.publisher.publish()
        await one.settled()
        assert one.feed.counters.malformed_frames == len(odd)


async def test_a_flood_of_events_does_not_block_the_event_loop() -> None:
    async with feed_line() as one:
        await one.subscribed()
        await one.settled()
        chain = list(range(500, 756))
        names = names_of(chain)
        event = BlockStored(
            hashes=names, parent=None, tokens=tuple(tokens_of(chain).tolist()), block_size=BLOCK
        )
        batch = encode_batch(0.0, [event] * 4)
        for _ in range(900):
            seq, one.publisher.next_seq = one.publisher.next_seq, one.publisher.next_seq + 1
            one.publisher.others[seq] = batch
            one.publisher.pub.send_multipart(live_frames("", seq, batch))
        last = one.publisher.next_seq - 1
        turns = 0
        deadline_s = time.monotonic() + DEADLINE_S
        while one.kv.next_seq <= last:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0)
            turns += 1
        assert turns > 10
        await until(lambda: one.kv.known, "the end of a replay that was asked for before")
