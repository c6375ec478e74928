"""Tests of replays that bring less than was missed: the rest is requested from elsewhere, or once
more.
"""

from __future__ import annotations

import pytest

import router.events.resync as missed_module
from engine.wire.events import replay_end, replay_frames
from tests.router.events.feed_support import FeedLine, Publisher, feed_line, in_five_frames, payload


async def one_too_late(publisher: Publisher, identity: bytes, start: int) -> None:
    """Answer a replay from one batch later than requested, as if the buffer had moved on."""
    await in_five_frames(publisher, identity, start + 1)


async def cut_before_the_end(publisher: Publisher, identity: bytes, start: int) -> None:
    for seq in range(start, publisher.next_seq - 2):
        await publisher.router.send_multipart(replay_frames(identity, "", seq, payload(seq)))
    await publisher.router.send_multipart(replay_end(identity))


async def silent_at_first(publisher: Publisher, identity: bytes, start: int) -> None:
    if len(publisher.replays) % 3 == 0:
        await in_five_frames(publisher, identity, start)


async def gap_of_two(one: FeedLine) -> None:
    for lost in (True, True, False):
        await one.publisher.publish(lost)


@pytest.mark.parametrize("answer", [one_too_late, cut_before_the_end])
async def test_a_snapshot_fills_the_gap_that_a_replay_leaves(answer) -> None:
    async with feed_line(answer, snapshot=True) as one:
        await one.subscribed()
        await one.settled()
        while not one.publisher.replays:  # a snapshot asked for at first may mend a gap or two
            await gap_of_two(one)
            await one.settled()
        assert one.kv.exact


async def test_an_unanswered_replay_request_is_repeated_before_it_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(missed_module, "_ASK_AGAIN_S", 0.01)
    async with feed_line(silent_at_first, timeout_s=0.1) as one:
        await one.subscribed()
        await one.settled()
        await gap_of_two(one)
        await one.settled()
        assert len(one.publisher.replays) >= 3
        assert one.kv.exact
        assert one.feed.counters.failed_syncs == 0
