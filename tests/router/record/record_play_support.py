"""Helpers for tests of recordings: a core whose facts are recorded, and random sequences
of facts.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from policies.facts import (
    Arrival,
    Cleared,
    Fact,
    Failure,
    Finish,
    FirstToken,
    KvEvents,
    LoadReport,
    Progress,
    ReplayEnd,
    Tick,
    WorkerChange,
    WorkerFacts,
)
from policies.load import load
from router.core.contract.settings import CoreSettings
from router.core.core import RouterCore
from router.record.facts import Player, records
from router.record.recorder import FactRecorder
from router.request.dispatcher import Dispatcher
from tests.router.core.core_world import BLOCK, chain_of, removed, stored

BOUNDS = CoreSettings(max_workers=4, hold_requests=3, inflight_requests=12, parked_blocks=12)
POLICIES = ("hybrid", "round_robin", "power_of_two", "hybrid?max_requests=1&temperature=0.5")


LIMITS = (["m:max_requests=1"], ["m:max_queued_tokens=9,max_requests=3"])


class RecordedDispatcher:
    """A recorded core to which a test gives facts. Lifetime: test."""

    def __init__(self, path: Path, policy: str = "hybrid", limit_bytes: int = 1 << 24) -> None:
        self.path = path
        self.now_s = 1000.0
        self.core = RouterCore(load(policy), BOUNDS, seed=5, report=lambda error: None)
        self.recorder = FactRecorder(path, limit_bytes, self.core, seed=5)
        self.dispatcher = Dispatcher(self.core, lambda: self.now_s, recorder=self.recorder)
        self.dispatcher._do = lambda action: None  # type: ignore[method-assign]

    def tell(self, fact: Fact) -> None:
        self.dispatcher.handle_fact(fact)

    def join(self, worker_id: int, **fields: Any) -> None:
        known = {"name": f"w{worker_id}", "models": ("m",), "block_size": BLOCK} | fields
        self.tell(WorkerChange(self.now_s, worker_id, "ready", WorkerFacts(**known)))

    def arrive(self, request_id: int, blocks: list[int], **fields: Any) -> None:
        self.tell(arrival(self.now_s, request_id, blocks, **fields))

    def events(self, worker_id: int, seq: int, *events: Any, source: Any = "live") -> None:
        self.tell(KvEvents(self.now_s, worker_id, seq, events, source))

    def played(self) -> Player:
        """Play the recording, check that it gives the recorded actions, and return its player."""
        self.recorder.close()
        player = Player(self.path)
        assert list(player.differences()) == []
        return player


def facts_in(path: Path) -> list[list[Any]]:
    return [r for r in records(path) if isinstance(r, list) and r[0] == "fact"]


def arrival(now_s: float, request_id: int, blocks: list[int], **fields: Any) -> Arrival:
    chains = {BLOCK: chain_of(blocks)}
    return Arrival(now_s, request_id, "m", len(blocks) * BLOCK + 1, chains, **fields)


# Queues are long gone otherwise, and small caches turn over.
SLOW = {"kv_capacity_tokens": 40.0, "prefill_tokens_per_s": 33.3}

PREFIXES = st.lists(st.integers(1, 2), min_size=1, max_size=4)
WORKERS = st.integers(0, 1)
SKIPS = st.sampled_from([0, 0, 0, 1, 2])
ENDS = st.sampled_from(["finish", "left", "fail", "move"])  # move: a worker dies in mid-answer
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), PREFIXES, st.sampled_from(["", "ann", "bob"])),
        st.tuples(st.just("end"), st.integers(0, 30), ENDS),
        st.tuples(st.just("grow"), st.integers(0, 30), st.integers(1, 50)),
        *[st.tuples(st.just("store"), WORKERS, PREFIXES, st.integers(0, 3), SKIPS)] * 4,
        st.tuples(st.just("remove"), WORKERS, PREFIXES, SKIPS),
        st.tuples(st.just("clear"), WORKERS),
        st.tuples(st.just("synced"), WORKERS, st.booleans()),
        st.tuples(st.just("change"), WORKERS, st.sampled_from(["ready", "down", "gone"])),
        st.tuples(st.just("report"), WORKERS, st.integers(0, 9)),
        st.tuples(st.just("ask"), PREFIXES),
        st.tuples(st.just("look")),
        st.tuples(st.just("policy"), st.sampled_from(POLICIES)),
        st.tuples(st.just("limits"), st.sampled_from([[], *LIMITS])),
        st.tuples(st.just("wait"), st.sampled_from([0.001, 0.3, 4.0, 40.0])),
    ),
    min_size=12,
    max_size=60,
)


class Story:
    """Turns the steps of a random story into facts for a desk. Lifetime: example."""

    def __init__(self, desk: RecordedDispatcher) -> None:
        self.desk = desk
        self.requests = 0
        self.seqs = [0, 0]
        for worker_id in range(2):
            desk.join(worker_id, **SLOW)

    def step(self, kind: str, *what: Any) -> None:
        self.desk.now_s += 0.01
        getattr(self, kind)(*what)

    def arrive(self, blocks: list[int], session: str) -> None:
        self.desk.arrive(self.requests, blocks, session=session or None, tenant="t")
        self.requests += 1

    def end(self, request_id: int, how: str) -> None:
        now_s = self.desk.now_s
        if (
            request_id in self.desk.core.held.requests()
        ):  # no worker has it: only its client ends it
            how = "left"
        if how == "finish":
            self.desk.tell(Finish(now_s, request_id, 9, 4, 3))
        else:
            blame: Any = "client" if how == "left" else "worker"
            rest = arrival(now_s, request_id, [1, 2, 1], session="ann") if how == "move" else None
            self.desk.tell(Failure(now_s, request_id, blame, how in ("fail", "move"), how, rest))

    def grow(self, request_id: int, tokens: int) -> None:
        self.desk.tell(FirstToken(self.desk.now_s, request_id))
        self.desk.tell(Progress(self.desk.now_s + 0.005, request_id, tokens))

    def _events(self, worker_id: int, skip: int, *events: Any) -> None:
        """Give the core a batch of KV events: the next one (`skip` 0), the one after a lost batch
        (1), or a replay of the last one (2).
        """
        self.seqs[worker_id] += 1 + (skip == 1)
        source = "replay" if skip == 2 else "live"
        seq = self.seqs[worker_id] - 1 - (skip == 2)
        self.desk.events(worker_id, seq, *events, source=source)

    def store(self, worker_id: int, blocks: list[int], after: int, skip: int) -> None:
        after = min(after, len(blocks) - 1)
        self._events(worker_id, skip, stored(blocks, after))

    def remove(self, worker_id: int, blocks: list[int], skip: int) -> None:
        self._events(worker_id, skip, removed(blocks))

    def clear(self, worker_id: int) -> None:
        self._events(worker_id, 0, Cleared())

    def synced(self, worker_id: int, answered: bool) -> None:
        self.desk.tell(ReplayEnd(self.desk.now_s, worker_id, answered))

    def change(self, worker_id: int, state: Any) -> None:
        if state == "ready":
            self.desk.join(worker_id, **SLOW)
        else:
            self.desk.tell(WorkerChange(self.desk.now_s, worker_id, state))

    def report(self, worker_id: int, running: int) -> None:
        self.desk.tell(LoadReport(self.desk.now_s, worker_id, running, 1, float("nan")))

    def ask(self, blocks: list[int]) -> None:
        self.desk.dispatcher.explain(arrival(self.desk.now_s, 10_000, blocks, session="ann"))

    def look(self) -> None:
        self.desk.dispatcher.advance()

    def policy(self, spec: str) -> None:
        self.desk.dispatcher.set_policy(load(spec))

    def limits(self, lines: list[str]) -> None:
        self.desk.dispatcher.set_model_limits(lines)

    def wait(self, seconds: float) -> None:
        self.desk.now_s += seconds
        self.desk.tell(Tick(self.desk.now_s))

    def ask_for_everything(self) -> None:
        """Send one request for each possible prompt, whose decisions show which blocks the workers
        hold.
        """
        self.limits([])
        for blocks in product((1, 2), repeat=4):
            self.step("arrive", list(blocks), "")
            self.step("end", self.requests - 1, "finish")
