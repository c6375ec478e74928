"""A random history of a small pool, which prints a digest of all actions. Tests run it as a
program.

It contains everything whose order might depend on a hash: names of models, sessions and tenants as
text, blocks named by bytes, several block sizes, workers that join, fail and leave, held and
refused requests.
"""

from __future__ import annotations

import hashlib
import random
import sys

import numpy as np

from kvkernels import chain_hashes
from policies.contract import FleetView, Floats, RequestView
from policies.facts import (
    Arrival,
    Failure,
    Finish,
    FirstToken,
    KvEvents,
    LoadReport,
    Progress,
    Removed,
    Stored,
    Tick,
    WorkerChange,
    WorkerFacts,
)
from policies.load import load
from router.core.contract.actions import Action, Cancel, Dispatch, Reject
from router.core.contract.settings import CoreSettings
from router.core.core import RouterCore

SIZES = (16, 32)
MODELS = ("alpha", "beta", "gamma")
POLICIES = (
    "round_robin",
    "power_of_two",
    "kv_prefix?temperature=0.3",
    "hybrid?max_queued_tokens=9000",
    "tests.router.core.random_world:at_most_three",
    "kv_prefix|thresholds?max_queued_tokens=900|progressive|bounded_load|late_binding",
    "warmset?gate=0.01",
)


def at_most_three(request: RequestView, fleet: FleetView, state: object) -> Floats:
    """Choose the worker with the fewest requests, and hold a request while every worker has three:
    a policy for tests.
    """
    return np.where(fleet.requests < 3, fleet.requests.astype(np.float64), np.inf)


class RandomWorld:
    """A decision core to which random events happen. Lifetime: test."""

    def __init__(self, policy: str, seed: int) -> None:
        self.rng = random.Random(seed)
        bounds = CoreSettings(max_workers=12, hold_requests=10, speculative_s=3.0)
        self.core = RouterCore(load(policy), bounds, seed=seed)
        self.now_s = 0.0
        self.digest = hashlib.sha256()
        self.next_id = 0
        self.open: dict[int, Arrival] = {}
        self.at: dict[int, int] = {}  # request -> worker it is dispatched to
        self.seq: dict[int, int] = {}
        self.size: dict[int, int] = {}
        self.tokens = [np.arange(n, n + 700, dtype=np.int32) for n in range(0, 9000, 1000)]
        self.prompts: dict[int, np.ndarray] = {}
        for worker_id in range(8):
            self.join(worker_id)

    def tell(self, actions: list[Action]) -> None:
        self.digest.update(repr(actions).encode())
        for action in actions:
            if isinstance(action, Dispatch):
                self.at[action.request_id] = action.worker_id
            elif isinstance(action, Cancel | Reject):
                self.at.pop(action.request_id, None)
                if isinstance(action, Reject):
                    self.open.pop(action.request_id, None)

    def join(self, worker_id: int) -> None:
        models = tuple(self.rng.sample(MODELS, self.rng.randint(1, 3)))
        self.size[worker_id] = self.rng.choice(SIZES)
        facts = WorkerFacts(
            f"w{worker_id}", models, self.size[worker_id], kv_capacity_tokens=20_000.0
        )
        self.seq[worker_id] = 0
        self.tell(self.core.on_worker(WorkerChange(self.now_s, worker_id, "ready", facts)))

    def arrive(self) -> None:
        request_id = self.next_id
        self.next_id += 1
        tokens = self.rng.choice(self.tokens)[: self.rng.randint(1, 700)]
        arrival = Arrival(
            now_s=self.now_s,
            request_id=request_id,
            model=self.rng.choice((*MODELS, "unknown")),
            prompt_tokens=len(tokens),
            chains={size: chain_hashes(tokens, size) for size in SIZES},
            session=f"session {self.rng.randrange(20)}" if self.rng.random() < 0.8 else None,
            tenant=f"tenant {self.rng.randrange(5)}",
            priority=self.rng.randrange(2),
            stream=self.rng.random() < 0.8,
        )
        self.open[request_id], self.prompts[request_id] = arrival, tokens
        self.tell(self.core.on_arrival(arrival))

    def end(self, request_id: int) -> None:
        worker_id = self.at.pop(request_id)
        kind = self.rng.randrange(6)
        if kind == 0:
            failure = Failure(self.now_s, request_id, "worker", retry=True, reason="reset")
            self.tell(self.core.on_failure(failure))
            return
        if kind == 2:
            self.leave(request_id)
            return
        del self.open[request_id]
        output_tokens = self.rng.choice((None, 40))
        self.tell(self.core.on_finish(Finish(self.now_s, request_id, output_tokens=output_tokens)))
        if worker_id in self.seq:
            self.publish(worker_id, self.prompts[request_id], evict=kind == 1)

    def leave(self, request_id: int) -> None:
        """Let the client of a dispatched or held request leave."""
        del self.open[request_id]
        self.at.pop(request_id, None)
        self.tell(self.core.on_failure(Failure(self.now_s, request_id, "client")))

    def publish(self, worker_id: int, tokens: np.ndarray, evict: bool) -> None:
        size = self.size[worker_id]
        names = tuple(
            hashlib.md5(tokens[: end + size].tobytes()).digest()
            for end in range(0, len(tokens) - size + 1, size)
        )
        event: Stored | Removed = Removed(names[-3:])
        if not evict:
            event = Stored(names, None, tuple(tokens[: len(names) * size].tolist()), size)
        batch = KvEvents(self.now_s, worker_id, self.seq[worker_id], (event,))
        self.seq[worker_id] += 1
        self.tell(self.core.on_kv_events(batch))

    def step(self) -> None:
        self.now_s += self.rng.expovariate(20.0)
        kind = self.rng.random()
        dispatched = list(self.at)
        worker_id = self.rng.randrange(8)
        if kind < 0.4 or not dispatched:
            self.arrive()
        elif kind < 0.5:
            self.tell(self.core.on_first_token(FirstToken(self.now_s, self.rng.choice(dispatched))))
        elif kind < 0.6:
            grown = Progress(self.now_s, self.rng.choice(dispatched), self.rng.randint(1, 99))
            self.tell(self.core.on_progress(grown))
        elif kind < 0.85:
            self.end(self.rng.choice(dispatched))
        elif kind < 0.9:
            self.tell(self.core.on_load_report(LoadReport(self.now_s, worker_id, 3, 1, 999.0)))
        elif kind < 0.95:
            self.tell(self.core.on_tick(Tick(self.now_s)))
        elif worker_id in self.seq:
            del self.seq[worker_id]
            self.tell(self.core.on_worker(WorkerChange(self.now_s, worker_id, "gone")))
        else:
            self.join(worker_id)


def digest(policy: str, seed: int, steps: int = 600) -> tuple[str, dict[str, int]]:
    """Return a digest of one world's actions, and how often each kind of event happened."""
    world = RandomWorld(policy, seed)
    for _ in range(steps):
        world.step()
    counters = world.core.counters
    return world.digest.hexdigest(), {
        "dispatched": sum(counters.decisions.values()),
        "held": counters.holds,
        "retried": counters.retries,
        "rejected": sum(counters.rejections.values()),
    }


if __name__ == "__main__":
    for seed, name in enumerate(POLICIES):
        sys.stdout.write(f"{name} {digest(name, seed)[0]}\n")
