"""What processes tell each other arrives as it was said, however it is cut up; garbage ends it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.facts import Arrival
from router.http.errors import ClientError, WorkerError
from router.http.relay.reply import Outcome, Usage
from router.processes.line import FRAME_BYTES, Frames, GarbageError, Line
from router.processes.messages import (
    Arrived,
    Begun,
    Ended,
    Faulty,
    Grown,
    Joined,
    Left,
    OfSatellite,
)
from router.processes.told import arrival_of, arrived, ended, outcome_of
from tests.effort import EFFORT

IDS = st.integers(0, (1 << 53) - 1)
MOMENTS = st.floats(0, 1e9)
NAMES = st.text(max_size=20)
COUNTS = st.none() | st.integers(0, 1 << 40)
CHAINS = st.dictionaries(
    st.integers(1, 4096),
    st.lists(st.integers(0, (1 << 64) - 1), max_size=8).map(
        lambda hashes: np.array(hashes, dtype=np.uint64)
    ),
    max_size=3,
)
ARRIVALS = st.builds(
    Arrival,
    now_s=MOMENTS,
    request_id=IDS,
    model=NAMES,
    prompt_tokens=st.integers(0, 1 << 40),
    chains=CHAINS,
    approximate=st.booleans(),
    max_output_tokens=COUNTS,
    session=st.none() | NAMES,
    tenant=st.none() | NAMES,
    priority=st.integers(-100, 100),
    stream=st.booleans(),
    longest_prompt_tokens=COUNTS,
    weight=st.floats(0.001, 1e6),
    deadline_s=st.none() | MOMENTS,
)
ERRORS = st.one_of(
    st.none(),
    st.builds(WorkerError, st.sampled_from(["busy", "connect", "early_close"]), NAMES),
    st.builds(ClientError, st.just(400), NAMES),
)
OUTCOMES = st.builds(
    Outcome,
    started_s=MOMENTS,
    status=st.none() | st.integers(100, 599),
    error=ERRORS,
    bytes_to_client=st.integers(0, 1 << 50),
    first_byte_s=st.none() | MOMENTS,
    last_byte_s=st.none() | MOMENTS,
    events=st.integers(0, 1 << 40),
    usage=st.none() | st.builds(Usage, COUNTS, COUNTS, COUNTS),
    resumable=st.booleans(),
)
MESSAGES = st.one_of(
    st.builds(Joined, st.integers(0, 300), st.integers(1, 1 << 22)),
    ARRIVALS.map(lambda arrival: arrived(arrival, "short")),
    st.builds(Begun, IDS),
    st.builds(Grown, IDS, st.integers(0, 1 << 40)),
    st.builds(Left, IDS, st.booleans()),
    st.builds(Faulty, st.integers(400, 499)),
    st.builds(ended, IDS, OUTCOMES, COUNTS, st.none() | ARRIVALS),
)


def framed(message: msgspec.Struct) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "little") + data


def same_arrival(one: Arrival, other: Arrival) -> bool:
    """Equal, chains by value."""
    if one.chains.keys() != other.chains.keys():
        return False
    plain = dataclasses.replace(one, chains={}) == dataclasses.replace(other, chains={})
    return plain and all(np.array_equal(one.chains[s], other.chains[s]) for s in one.chains)


@settings(max_examples=100 * EFFORT)
@given(st.lists(MESSAGES, max_size=6), st.data())
def test_messages_arrive_as_they_were_said_wherever_the_stream_is_cut(messages, data) -> None:
    stream = b"".join(map(framed, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    frames: Frames[OfSatellite] = Frames(OfSatellite)
    heard = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        heard += frames.take(stream[start:end])
    assert heard == messages


@settings(max_examples=100 * EFFORT)
@given(ARRIVALS, st.sampled_from(["no", "short", "full", "sampled"]))
def test_a_request_is_the_same_at_the_leader_but_for_its_moment(arrival, explain) -> None:
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(arrived(arrival, explain)), type=Arrived)
    assert told.explain == explain
    assert same_arrival(arrival_of(told, arrival.now_s), arrival)
    assert all(chain.dtype == np.uint64 for chain in arrival_of(told, 0.0).chains.values())


@settings(max_examples=100 * EFFORT)
@given(OUTCOMES)
def test_an_outcome_is_the_same_at_the_leader(outcome) -> None:
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(ended(7, outcome, 5, None)), type=Ended)
    again = outcome_of(told)
    for field in dataclasses.fields(Outcome):
        if field.name != "error":
            assert getattr(again, field.name) == getattr(outcome, field.name)
    assert type(again.error) is type(outcome.error)
    assert again.retryable == outcome.retryable
    if outcome.error is not None:
        assert again.error is not None
        assert again.error.message == outcome.error.message
    if isinstance(outcome.error, WorkerError) and isinstance(again.error, WorkerError):
        assert again.error.kind == outcome.error.kind


def test_no_field_of_a_request_or_an_outcome_is_left_out() -> None:
    """A new field must be told, too, or be named here with a reason."""
    arrivals = {f.name for f in dataclasses.fields(Arrival)} - {"now_s"}  # the leader's clock
    assert arrivals <= set(Arrived.__struct_fields__)
    # A held reply stays with its satellite, who may have to deliver it; an error is told as
    # `blame` and `message`.
    outcomes = {f.name for f in dataclasses.fields(Outcome)} - {"held", "error"}
    assert outcomes <= set(Ended.__struct_fields__)


@settings(max_examples=200 * EFFORT)
@given(st.binary(max_size=64))
def test_garbage_is_refused_or_waited_for_and_never_something_else(data) -> None:
    frames: Frames[OfSatellite] = Frames(OfSatellite)
    try:
        heard = frames.take(data)
    except GarbageError:
        return
    assert all(isinstance(message, msgspec.Struct) for message in heard)


def test_a_frame_beyond_the_bound_is_refused_before_it_is_kept() -> None:
    frames: Frames[OfSatellite] = Frames(OfSatellite)
    with pytest.raises(GarbageError, match="at most"):
        frames.take((FRAME_BYTES + 1).to_bytes(4, "little"))


async def test_a_line_carries_what_is_said_in_a_turn_in_order_and_ends_on_garbage(tmp_path) -> None:
    loop = asyncio.get_running_loop()
    heard: asyncio.Queue[OfSatellite] = asyncio.Queue()
    lost: asyncio.Future[str] = loop.create_future()

    def keep(messages: Sequence[OfSatellite]) -> None:
        for message in messages:
            heard.put_nowait(message)

    line: Line[OfSatellite] = Line(OfSatellite, keep, lost.set_result)
    server = await loop.create_unix_server(lambda: line, str(tmp_path / "line"))
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "line"))
    said = [Begun(1), Grown(1, 2), Left(1, False)]
    writer.write(b"".join(map(framed, said)))
    assert [await heard.get() for _ in said] == said
    writer.write(b"\x02\x00\x00\x00\xff\xff")
    assert (await lost).startswith("garbage")
    assert await reader.read() == b""
    line.say(Begun(2))  # after its end nothing happens
    writer.close()
    server.close()
    await server.wait_closed()
