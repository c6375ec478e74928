"""Tests of saving the workers' caches: when they are saved, to which worker a saved cache belongs,
and how long it is kept.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from policies.facts import KvEvents, ReplayEnd, WorkerChange, WorkerFacts
from router.restart import saved_caches as keeper_module
from router.restart.saved_caches import Saved, StateKeeper, read_saved
from tests.router.core.core_world import BLOCK, World, stored
from tests.router.restart.saved_support import URL, saved_of, write
from tests.router.waiting import until


@dataclass
class Engine:
    """The facts about an engine that recognition finds out, for a saved cache."""

    kind: str = "vllm"
    address: int | None = None


@dataclass
class Spec:
    url: str = URL


@dataclass
class FleetMember:
    """The attributes of a fleet member that the keeper reads. Lifetime: test."""

    worker_id: int = 0
    spec: Spec = field(default_factory=Spec)
    recognized: Engine | None = field(default_factory=Engine)


class Router:
    """A decision core with one worker, and the keeper that saves its cache. Lifetime: test."""

    def __init__(self, path: Path, engine: Engine | None = None, **facts: Any) -> None:
        self.world = World(workers=0)
        self.members: Any = {0: FleetMember(recognized=engine or Engine())}
        self.wall_s = 1e9
        self.keeper = StateKeeper(path, self.world.core, lambda: self.members, lambda: self.wall_s)
        known = {"name": URL, "models": ("m",), "block_size": BLOCK} | facts
        self.spec = WorkerFacts(**known)

    def join(self) -> None:
        self.set_state("ready", self.spec)

    def set_state(self, state: Any, spec: WorkerFacts | None = None) -> None:
        self.world.core.on_worker(self.keeper.with_saved_cache(WorkerChange(0.0, 0, state, spec)))

    def batch(self, seq: int, *events: Any, source: Any = "live") -> None:
        self.world.core.on_kv_events(KvEvents(0.0, 0, seq, events, source, 1 + seq))

    @property
    def kv(self) -> Any:
        return self.world.core.workers.get(0).kv


async def save_warm_cache(path: Path) -> None:
    """Run a router whose worker stores three blocks, and stop it, so that it saves them
    at `path`.
    """
    router = Router(path)
    await router.keeper.load()
    router.keeper.start(lambda: 3600.0)
    router.join()
    for seq in range(3):
        router.batch(seq, stored([seq]))
    await router.keeper.close()
    assert router.keeper.saves == 1


async def test_the_next_router_continues_with_the_saved_cache(tmp_path: Path) -> None:
    await save_warm_cache(tmp_path / "kv")
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
async def test_another_worker_does_not_get_the_saved_cache(
    tmp_path: Path, engine: Engine, facts: dict[str, Any]
) -> None:
    await save_warm_cache(tmp_path / "kv")
    after = Router(tmp_path / "kv", engine, **facts)
    await after.keeper.load()
    after.join()
    assert (after.kv.resident_blocks, after.kv.first_question) == (0, 0)


async def test_a_worker_that_rejoins_does_not_get_the_saved_cache(tmp_path: Path) -> None:
    await save_warm_cache(tmp_path / "kv")
    after = Router(tmp_path / "kv")
    await after.keeper.load()
    after.join()
    after.set_state("gone")
    after.join()
    assert after.kv.resident_blocks == 0
    await after.keeper.save()
    assert read_saved(tmp_path / "kv") == []


@pytest.mark.parametrize("data", [b"", b"garbage", b"warmroute-kv\0\0\0\7"])
async def test_an_unusable_file_is_a_warning(tmp_path: Path, data: bytes, caplog) -> None:
    path = tmp_path / "kv"
    path.write_bytes(data)
    router = Router(path)
    await router.keeper.load()
    assert "caches are learned anew" in caplog.text
    router.join()
    assert router.kv.first_question == 0


async def test_a_router_that_ends_before_its_workers_join_keeps_the_file(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    await save_warm_cache(path)
    before = path.read_bytes()
    hasty = Router(path)
    await hasty.keeper.load()
    hasty.keeper.start(lambda: 3600.0)
    await hasty.keeper.close()
    assert path.read_bytes() == before
    unready = Router(path)
    await unready.keeper.close()  # it failed before it had read the file
    assert path.read_bytes() == before


async def test_caches_are_saved_at_every_interval(tmp_path: Path) -> None:
    router = Router(tmp_path / "kv")
    await router.keeper.load()
    router.keeper.start(lambda: 0.001)
    await until(lambda: router.keeper.saves >= 2, "two savings")
    await router.keeper.close()
    assert router.keeper.size_bytes == (tmp_path / "kv").stat().st_size
    assert router.keeper.age_s < 60.0


async def test_the_cache_of_an_absent_worker_is_kept_for_a_day(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    await save_warm_cache(path)
    before = read_saved(path)
    after = Router(path)
    await after.keeper.load()
    after.wall_s += 86_399.0
    await after.keeper.save()
    assert read_saved(path) == before
    after.wall_s += 2.0
    await after.keeper.save()
    assert read_saved(path) == []


async def test_a_saved_cache_stays_in_the_file_until_there_is_a_newer_one(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    await save_warm_cache(path)
    (before,) = read_saved(path)
    after = Router(path)
    await after.keeper.load()
    after.join()  # its publisher has proven nothing yet
    await after.keeper.save()
    assert read_saved(path) == [before]
    after.batch(2, stored([2]), source="replay")
    after.batch(3, stored([3]))
    await after.keeper.save()
    (now,) = read_saved(path)
    assert now.snapshot.next_seq == before.snapshot.next_seq + 1


async def test_the_cache_of_a_worker_that_is_down_stays_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    router = Router(path)
    router.join()
    for seq in range(3):
        router.batch(seq, stored([seq]))
    router.set_state("down")
    assert router.kv.resident_blocks == 0
    for _ in range(2):
        await router.keeper.save()
        (kept,) = read_saved(path)
        assert kept.snapshot.next_seq == 3
    after = Router(path)
    await after.keeper.load()
    after.join()
    assert after.kv.first_question == 2
    router.join()  # meanwhile it is back, with other batches
    router.batch(0, stored([7]))
    await router.keeper.save()
    (kept,) = read_saved(path)
    assert kept.snapshot.next_seq == 1


@pytest.mark.parametrize("when", ["before", "after"])
async def test_the_cache_of_a_removed_worker_is_removed_from_the_file(
    tmp_path: Path, when: str
) -> None:
    path = tmp_path / "kv"
    router = Router(path)
    router.join()
    router.batch(0, stored([1]))
    router.set_state("down")
    if when == "after":
        await router.keeper.save()
    router.set_state("gone")
    await router.keeper.save()
    assert read_saved(path) == []


async def test_the_caches_of_absent_workers_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    heads = [
        replace(saved_of(n).head, saved_at=1e9 - at) for n, at in enumerate((30.0, 10.0, 20.0))
    ]
    cache = dataclasses.replace(saved_of(0).snapshot, blocks=b"x" * 100)
    write(path, [Saved(head, cache) for head in heads])
    monkeypatch.setattr(keeper_module, "AWAY_BYTES", 250)
    router = Router(path)
    await router.keeper.load()
    await router.keeper.save()
    assert [one.head for one in read_saved(path)] == [heads[1], heads[2]]  # the latest


async def test_an_unwritable_path_is_logged_as_an_error(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.ERROR)
    router = Router(tmp_path / "none" / "kv")
    await router.keeper.load()
    router.keeper.start(lambda: 3600.0)
    await router.keeper.close()
    assert (router.keeper.saves, router.keeper.failed_saves, router.keeper.size_bytes) == (0, 1, 0)
    assert "No such file or directory" in caplog.text
