"""A pool on virtual time with the real decision core and real schedulers, without a process or a
socket.

It shows the effect of a policy on a pool in a second or two, with the step times of a profile.
Workers have no KV events: the core estimates their caches from its own requests, which is exact as
long as no block is evicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.block_pool import BlockPool
from engine.profiles import profile
from engine.scheduler.scheduler import Output, Request, Scheduler, SchedulerSettings, Step
from policies.contract import Hashes
from policies.facts import Arrival, Finish, FirstToken, Progress, WorkerChange, WorkerFacts
from policies.load import load
from router.core.contract.actions import Action, Dispatch
from router.core.contract.settings import CoreSettings
from router.core.core import RouterCore

MODEL = "m"
ARRIVAL, STEP_END = 0, 1


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a workload: its arrival, its block hashes and its lengths."""

    arrival_s: float
    chain: Hashes
    prompt_tokens: int
    output_tokens: int
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a workload, for each worker and for each request in order of arrival."""

    requests: list[int]  # per worker
    ttft_s: np.ndarray
    hit_rate: float  # cached prompt tokens of all prompt tokens, as the workers count

    @property
    def skew(self) -> float:
        """The requests of the busiest worker divided by the mean per worker."""
        return max(self.requests) / (sum(self.requests) / len(self.requests))


class Pool:
    """Simulated workers and a decision core; the workers in `slow` run at half speed. Lifetime: one
    run.
    """

    def __init__(
        self,
        policy: str,
        name: str,
        workers: int,
        kv_tokens: int,
        block_size: int,
        seed: int,
        slow: Sequence[int] = (),
    ) -> None:
        self.core = RouterCore(load(policy), CoreSettings(max_workers=workers), seed)
        step_time = profile(name).step_time
        self.step_time = step_time
        self.slowness = [2.0 if worker in slow else 1.0 for worker in range(workers)]
        self.schedulers = []
        for worker_id in range(workers):
            facts = WorkerFacts(
                name=f"w{worker_id}",
                models=(MODEL,),
                block_size=block_size,
                kv_capacity_tokens=kv_tokens,
                prefill_tokens_per_s=step_time.prefill_tokens_per_s,
                step_s=step_time.decode_step_s(8, 8_000),
                has_events=False,
            )
            self.core.on_worker(WorkerChange(0.0, worker_id, "ready", facts))
            blocks = BlockPool(kv_tokens // block_size, block_size, record_events=False)
            self.schedulers.append(Scheduler(SchedulerSettings(), blocks))

    def run(self, jobs: Sequence[Job]) -> Outcome:
        """Serve `jobs` until the last one has finished."""
        events: list[tuple[float, int, int]] = [
            (job.arrival_s, ARRIVAL, number) for number, job in enumerate(jobs)
        ]
        heapq.heapify(events)
        under_way: dict[int, Step] = {}
        requests = [0] * len(self.schedulers)
        ttft_s = np.full(len(jobs), np.nan)
        while events:
            now_s, kind, number = heapq.heappop(events)
            if kind == ARRIVAL:
                worker_id = self._arrive(number, jobs[number], now_s)
                requests[worker_id] += 1
            else:
                worker_id = number
                step = under_way.pop(worker_id)
                tokens = {request.request_id: 0 for request in step.sampled}
                for output in self.schedulers[worker_id].complete(step, tokens, now_s):
                    if len(output.request.output) == 1:
                        ttft_s[output.request.request_id] = now_s - output.request.arrival_s
                    self._tell(output, now_s)
            if worker_id not in under_way:
                next_step = self.schedulers[worker_id].schedule(now_s)
                if next_step is not None:
                    under_way[worker_id] = next_step
                    step_s = self.step_time.seconds(next_step) * self.slowness[worker_id]
                    heapq.heappush(events, (now_s + step_s, STEP_END, worker_id))
        assert self.core.inflight_requests == 0
        assert not np.isnan(ttft_s).any(), "a request was lost"
        queries = sum(s.prefix_query_tokens_total for s in self.schedulers)
        hits = sum(s.prefix_hit_tokens_total for s in self.schedulers)
        return Outcome(requests, ttft_s, hits / queries)

    def _arrive(self, number: int, job: Job, now_s: float) -> int:
        size = self.schedulers[0].pool.block_size
        actions: list[Action] = self.core.on_arrival(
            Arrival(now_s, number, MODEL, job.prompt_tokens, {size: job.chain}, session=job.session)
        )
        (action,) = actions
        assert isinstance(action, Dispatch), action
        prompt = np.zeros(job.prompt_tokens, dtype=np.int32)
        request = Request(number, prompt, job.output_tokens, chain=job.chain.tolist())
        self.schedulers[action.worker_id].add(request, now_s)
        return action.worker_id

    def _tell(self, output: Output, now_s: float) -> None:
        number, count = output.request.request_id, len(output.request.output)
        if count == 1:
            self.core.on_first_token(FirstToken(now_s, number))
        self.core.on_progress(Progress(now_s, number, count))
        if output.finished:
            self.core.on_finish(Finish(now_s, number))


def shared_prompt(
    requests: int, rate_per_s: float, shared: int, unique: int, output: int, seed: int
) -> list[Job]:
    """Return requests with Poisson arrivals, one shared prompt and unique suffixes, in blocks of
    16.
    """
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1 / rate_per_s, requests))
    trunk = np.arange(1, shared // 16 + 1, dtype=np.uint64)
    own = unique // 16
    return [
        Job(
            float(time_s),
            np.concatenate((trunk, np.arange(own, dtype=np.uint64) + np.uint64(10**6 * (n + 1)))),
            shared + unique,
            output,
        )
        for n, time_s in enumerate(times)
    ]


def conversations(
    sessions: int, rate_per_s: float, trunk: int, turns: int, new: int, output: int, seed: int
) -> list[Job]:
    """Return sessions of up to `turns` turns behind one system prompt of `trunk` tokens, in blocks
    of 16.

    The loop is open: a turn comes 3 s or more after the one before it. Every prompt is the whole
    history: the trunk, earlier turns with their answers, and a log-normal number of new tokens.
    """
    random = np.random.default_rng(seed)
    base = np.arange(1, trunk // 16 + 1, dtype=np.uint64)
    jobs = []
    start_s = 0.0
    for session in range(sessions):
        start_s += float(random.exponential(1 / rate_per_s))
        time_s, prompt = start_s, trunk
        for _ in range(int(random.integers(1, turns + 1))):
            prompt += max(1, int(new * random.lognormal(0.0, 0.6)))
            own = np.arange(prompt // 16 - trunk // 16, dtype=np.uint64)
            chain = np.concatenate((base, own + np.uint64(10**6 * (session + 1))))
            jobs.append(Job(time_s, chain, prompt, output, session=f"s{session}"))
            prompt += output
            time_s += 3.0 + 3.0 * float(random.lognormal(0.0, 0.6))
    return sorted(jobs, key=lambda job: job.arrival_s)
