"""The file of saved streams: what is written is read, what is damaged is a cold start."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.facts import KvEvents, ReplayEnd, WorkerChange, WorkerFacts
from router.state.keeper import StateKeeper
from router.state.saved_file import Head, Owner, Saved, SavedFile, SavedFileError, read_saved
from tests.effort import EFFORT
from tests.router.core_world import BLOCK, World, stored
from tests.router.feed_support import until

URL = "http://127.0.0.1:9001"


def saved_of(n: int, blocks: bytes = b"blocks") -> Saved:
    owner = Owner(f"{URL}{n}", None if n % 2 else n, "vllm", ("m", "adapter"), 16)
    return Saved(Head(owner, n + 1, 2**64 - 1 - n, bool(n % 2)), blocks)


def write(path: Path, workers: list[Saved]) -> int:
    file = SavedFile(path)
    for one in workers:
        file.add(one)
    return file.finish()


@settings(max_examples=50 * EFFORT, deadline=None)
@given(bodies=st.lists(st.binary(min_size=1, max_size=200), max_size=5))
def test_what_is_written_is_read(tmp_path_factory: Any, bodies: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("saved") / "kv"
    workers = [saved_of(n, body) for n, body in enumerate(bodies)]
    assert write(path, workers) == path.stat().st_size
    assert read_saved(path) == workers
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["kv"]


@settings(max_examples=300 * EFFORT, deadline=None)
@given(
    at=st.integers(0, 10**6), flip=st.integers(1, 255), cut=st.integers(0, 10**6), tail=st.binary()
)
def test_a_damaged_file_is_never_read_as_another_one(
    tmp_path_factory: Any, at: int, flip: int, cut: int, tail: bytes
) -> None:
    path = tmp_path_factory.mktemp("saved") / "kv"
    write(path, [saved_of(0), saved_of(1)])
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[at % len(whole)] ^= flip
    damaged = [bytes(flipped), whole[: cut % len(whole)]]
    if tail:
        damaged.append(whole + tail)
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(SavedFileError):
            read_saved(path)


def test_lengths_that_the_file_does_not_have_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    write(path, [])
    head = path.read_bytes()[:16]
    for lengths in (b"\0\0\0\1" + b"\x7f" + b"\xff" * 7, b"\xff" * 12):
        path.write_bytes(head + lengths + b"\0" * 64)
        with pytest.raises(SavedFileError, match="more bytes than the file"):
            read_saved(path)


def test_one_that_is_abandoned_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    write(path, [saved_of(3)])
    file = SavedFile(path)
    file.add(saved_of(4))
    file.abandon()
    assert read_saved(path) == [saved_of(3)]
    assert [entry.name for entry in tmp_path.iterdir()] == ["kv"]


# --- when it is written, and whose it is --------------------------------------------------------


@dataclass
class Engine:
    """What is recognized of a worker."""

    kind: str = "vllm"
    address: int | None = None


@dataclass
class Spec:
    url: str = URL


@dataclass
class Follower:
    """What the keeper looks at of a member. Lifetime: test."""

    worker_id: int = 0
    spec: Spec = field(default_factory=Spec)
    recognized: Engine | None = field(default_factory=Engine)


class Router:
    """A core with one worker, and its keeper. Lifetime: test."""

    def __init__(self, path: Path, engine: Engine | None = None, **facts: Any) -> None:
        self.world = World(workers=0)
        self.members: Any = {0: Follower(recognized=engine or Engine())}
        self.keeper = StateKeeper(path, self.world.core, lambda: self.members)
        known = {"name": URL, "models": ("m",), "block_size": BLOCK} | facts
        self.spec = WorkerFacts(**known)

    def join(self) -> None:
        fact = WorkerChange(0.0, 0, "ready", self.spec)
        self.world.core.on_worker(self.keeper.with_saved(fact))

    def batch(self, seq: int, *events: Any, source: Any = "live") -> None:
        self.world.core.on_kv_events(KvEvents(0.0, 0, seq, events, source, 1 + seq))

    @property
    def kv(self) -> Any:
        return self.world.core.workers.get(0).kv


async def warmed(path: Path) -> None:
    """A router that knew three blocks and ended."""
    router = Router(path)
    await router.keeper.load()
    router.keeper.start(lambda: 3600.0)
    router.join()
    for seq in range(3):
        router.batch(seq, stored([seq]))
    await router.keeper.close()
    assert router.keeper.saves == 1


async def test_the_next_router_goes_on_where_one_ended(tmp_path: Path) -> None:
    await warmed(tmp_path / "kv")
    after = Router(tmp_path / "kv")
    await after.keeper.load()
    after.join()
    assert after.kv.first_question == 2
    after.batch(2, stored([2]), source="replay")
    after.world.core.on_replay_end(ReplayEnd(0.0, 0, answered=True))
    assert after.kv.known
    assert [after.world.hits([n]) for n in range(3)] == [[1]] * 3


@pytest.mark.parametrize(
    ("engine", "facts"),
    [
        (Engine(kind="sglang"), {}),
        (Engine(address=1), {}),
        (Engine(), {"models": ("m", "adapter")}),
        (Engine(), {"block_size": 2 * BLOCK}),
        (Engine(), {"has_events": False}),
    ],
)
async def test_another_worker_gets_nothing(
    tmp_path: Path, engine: Engine, facts: dict[str, Any]
) -> None:
    await warmed(tmp_path / "kv")
    after = Router(tmp_path / "kv", engine, **facts)
    await after.keeper.load()
    after.join()
    assert (after.kv.resident_blocks, after.kv.first_question) == (0, 0)


async def test_a_worker_that_joins_again_gets_nothing(tmp_path: Path) -> None:
    await warmed(tmp_path / "kv")
    after = Router(tmp_path / "kv")
    await after.keeper.load()
    after.join()
    after.world.core.on_worker(WorkerChange(0.0, 0, "gone"))
    after.join()
    assert after.kv.resident_blocks == 0


@pytest.mark.parametrize("data", [b"", b"garbage", b"warmroute-kv\0\0\0\7"])
async def test_a_file_that_cannot_be_used_is_a_warning(tmp_path: Path, data: bytes, caplog) -> None:
    path = tmp_path / "kv"
    path.write_bytes(data)
    router = Router(path)
    await router.keeper.load()
    assert "caches are learned anew" in caplog.text
    router.join()
    assert router.kv.first_question == 0


async def test_a_router_that_ends_before_its_workers_came_keeps_their_state(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    await warmed(path)
    before = path.read_bytes()
    hasty = Router(path)
    await hasty.keeper.load()
    hasty.keeper.start(lambda: 3600.0)
    await hasty.keeper.close()
    assert path.read_bytes() == before
    unready = Router(path)
    await unready.keeper.close()  # it failed before it had read the file
    assert path.read_bytes() == before


async def test_it_saves_at_every_interval_and_forgets_who_did_not_come(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    await warmed(path)
    after = Router(path)
    await after.keeper.load()
    after.keeper.start(lambda: 0.001)
    await until(lambda: after.keeper.saves >= 2, "two savings")
    await after.keeper.close()
    assert read_saved(path) == []


async def test_a_place_that_cannot_be_written_is_an_error_in_the_log(
    tmp_path: Path, caplog
) -> None:
    caplog.set_level(logging.ERROR)
    router = Router(tmp_path / "none" / "kv")
    await router.keeper.load()
    router.keeper.start(lambda: 3600.0)
    await router.keeper.close()
    assert (router.keeper.saves, router.keeper.failed_saves) == (0, 1)
    assert "No such file or directory" in caplog.text
