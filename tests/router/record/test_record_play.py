"""Tests that recorded facts, played to a fresh core, give the recorded actions."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.load import PolicyError
from router.core.placement.worker_caches import TableFullError
from router.record.facts import FORMAT, Player, RecordingError, framed, records
from tests.effort import examples
from tests.router.core.core_world import BLOCK, stored
from tests.router.record.record_play_support import (
    POLICIES,
    STEPS,
    RecordedDispatcher,
    Story,
    arrival,
    facts_in,
)

SECRET = 7_654_321  # a token id that must not be found in a file


@settings(max_examples=examples(200), deadline=None)
@given(steps=STEPS, policy=st.sampled_from(POLICIES))
def test_any_facts_play_back_to_the_same_actions(steps: list[Any], policy: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        desk = RecordedDispatcher(Path(folder) / "facts", policy)
        story = Story(desk)
        for step in steps:
            story.step(*step)
        story.ask_for_everything()
        player = desk.played()
    assert player.facts >= 34
    assert player.ended == "the router ended"


def test_a_changed_fact_in_a_recording_is_found(tmp_path: Path) -> None:
    desk = RecordedDispatcher(tmp_path / "facts")
    for worker_id in range(3):
        desk.join(worker_id)
    desk.events(1, 0, stored([1, 2, 3]))
    desk.arrive(0, [1, 2, 3])
    desk.played()
    kept = list(records(desk.path))
    assert kept[4][:2] == ["fact", "KvEvents"]
    kept[4][2]["worker_id"] = 2
    desk.path.write_bytes(b"".join(map(framed, kept)))
    (difference,) = Player(desk.path).differences()
    assert (difference.fact, difference.kind) == (4, "Arrival")
    assert "recorded [['Dispatch'" in str(difference)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_blocks_recorded_before_their_parent_get_their_chains(tmp_path: Path, order: Any) -> None:
    desk = RecordedDispatcher(tmp_path / "facts")
    desk.join(0)
    desk.join(1)
    parts = [stored([1, 2]), stored([1, 2, 3, 4], after=2), stored([1, 2, 3, 4, 5], after=4)]
    for seq, part in enumerate(order):
        desk.events(0, seq, parts[part])
    desk.arrive(0, [1, 2, 3, 4, 5, 6])
    player = desk.played()
    (dispatch,) = [r[3][0] for r in facts_in(desk.path) if r[1] == "Arrival"]
    assert dispatch[1]["decision"]["hit_tokens"] == 5 * BLOCK
    assert player.actions >= 1
    assert desk.recorder._sink._names.unresolved == 0


def test_no_token_id_and_no_session_is_in_the_file(tmp_path: Path) -> None:
    desk = RecordedDispatcher(tmp_path / "facts")
    desk.join(0)
    for seq, blocks in enumerate(([SECRET, 1], [SECRET, 1, 2])):
        desk.events(0, seq, stored(blocks, after=seq))
    desk.events(0, 2, replace(stored([SECRET, 8]), parent=b"who?"))
    desk.events(0, 3, replace(stored([SECRET, 9]), tokens=(SECRET,)))  # as nobody should
    desk.arrive(0, [SECRET], session="alice@example.org")
    desk.arrive(1, [SECRET], session="alice@example.org")
    desk.played()
    data = desk.path.read_bytes()
    assert b"alice" not in data
    for spelled in (msgspec.msgpack.encode(SECRET), np.int32(SECRET).tobytes()):
        assert spelled not in data
    sessions = [r[2]["session"] for r in facts_in(desk.path) if r[1] == "Arrival"]
    assert sessions[0] == sessions[1] is not None
    assert desk.recorder._sink._names.unresolved == 2


def test_an_unserved_model_is_not_recorded_and_is_refused_the_same_in_replay(
    tmp_path: Path,
) -> None:
    desk = RecordedDispatcher(tmp_path / "facts")
    for request_id in range(2):
        fact = replace(arrival(1.0, request_id, [1]), model='it\'s a "secret"')
        desk.tell(fact)
        desk.dispatcher.explain(fact)
        desk.join(0)
    desk.played()
    assert b"secret" not in desk.path.read_bytes()
    codes = [r[3][0][1]["code"] for r in facts_in(desk.path) if r[1] == "Arrival"]
    assert codes == ["no_worker_available", "model_not_found"]


def test_errors_of_the_core_are_recorded_and_replayed(tmp_path: Path) -> None:
    desk = RecordedDispatcher(tmp_path / "facts")
    desk.join(0)
    desk.arrive(0, [1])
    with pytest.raises(AssertionError):
        desk.arrive(0, [1])
    for worker_id in range(1, 4):
        desk.join(worker_id)
    with pytest.raises(TableFullError):
        desk.join(4)
    desk.played()
    errors = [r[3] for r in facts_in(desk.path) if isinstance(r[3], str)]
    assert errors == ["AssertionError", "TableFullError"]


def test_a_recording_at_its_limit_ends_and_contains_the_reason(tmp_path: Path, caplog) -> None:
    desk = RecordedDispatcher(tmp_path / "facts", limit_bytes=6_000)
    desk.join(0)
    for request_id in range(500):
        desk.arrive(request_id, [request_id])
    player = desk.played()
    assert desk.path.stat().st_size <= 6_000
    assert player.ended == f"{desk.path} has reached its limit, record_facts_bytes"
    assert caplog.text.count("facts recorder ends: ") == 1
    assert desk.recorder.is_closed


def test_a_full_disk_ends_the_recording_and_the_core_continues(caplog) -> None:
    desk = RecordedDispatcher(Path("/dev/full"))
    desk.join(0)
    desk.arrive(0, [1])
    assert desk.core.inflight_requests == 1
    desk.recorder.close()
    assert desk.recorder.is_closed
    assert "cannot write /dev/full: No space left on device" in caplog.text


def test_an_older_recording_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    for worker_id in (3, 2):
        desk = RecordedDispatcher(tmp_path / "facts")
        desk.join(worker_id)
        desk.played()
    assert facts_in(tmp_path / "facts.1")[0][2]["worker_id"] == 3
    assert (tmp_path / "facts").stat().st_mode & 0o777 == 0o600


BEGINNING = {"settings": {}, "seed": 0, "policy": "hybrid", "format": FORMAT, "version": 1}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "does not begin as a recording"),
        (b"\xff\xff\xff\xff", "no recording"),
        (b"\0\0\0\1\xc1", "record 0 is no msgpack"),
        (framed(["fact"]), "does not begin as a recording"),
        (framed(BEGINNING | {"format": "x"}), "is 'x', version 1; expected 'warmroute-facts'"),
        (framed(BEGINNING | {"version": 2}), "version 2; expected 'warmroute-facts', version 1"),
        (framed(BEGINNING | {"settings": {"x": 1}}), "settings of another version"),
        (framed(BEGINNING) + framed(["what?"]), "record 1 is of no known kind"),
    ],
)
def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "facts"
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=says):
        Player(path)


@settings(max_examples=examples(150), deadline=None)
@given(at=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.integers(0, 10_000))
def test_a_damaged_recording_is_an_error_or_plays(at: int, byte: int, cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "facts"
        desk = RecordedDispatcher(path)
        story = Story(desk)
        for step in (("arrive", [1, 2], "ann"), ("store", 0, [1, 2, 3], 1, 0), ("wait", 0.3)):
            story.step(*step)
        desk.recorder.close()
        data = bytearray(path.read_bytes())
        data[at % len(data)] = byte
        path.write_bytes(data[: len(data) - cut % len(data)])
        with suppress(RecordingError, PolicyError):  # and nothing else
            list(Player(path).differences())


def test_a_truncated_recording_plays_up_to_the_cut(tmp_path: Path) -> None:
    desk = RecordedDispatcher(tmp_path / "facts")
    desk.join(0)
    desk.arrive(0, [1])
    desk.recorder.close()
    desk.path.write_bytes(desk.path.read_bytes()[:-5])
    player = Player(desk.path)
    assert list(player.differences()) == []
    assert (player.ended, player.facts) == ("cut off", 2)
