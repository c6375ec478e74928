"""Request logs with and without a planted mistake in the pool's configuration, and the advice on
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

import msgspec
from rich.console import Console

from simulator.replay.setup import RouterSettings, Setup, WorkerGroup
from simulator.runs.advice import Advice, ForecastLine
from simulator.runs.advise import DRAWS, AdviceRequest, Adviser
from simulator.runs.plan import Targets
from simulator.runs.runs import RunOptions, RunResults
from simulator.traces.files import opened
from simulator.traces.job import ErrorLog
from simulator.traces.request_log import read_recorded
from simulator.traces.spec import WorkloadSpec
from tests.simulator.runs.logged import STARTED_S, log_of

PROFILE = "llama-3.1-8b-h100"
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Case:
    """A pool and its traffic, on which advice is given. Lifetime: test."""

    name: str
    source: str
    policy: str
    count: int = 3
    kv_tokens: int = 100_000
    block_size: int = 16
    max_requests: float | None = None
    limits: tuple[tuple[str, int], ...] = ()
    requests: int = 400
    kind: str = ""  # of the mistake

    def setup(self, seed: int) -> Setup:
        """Return the case as the set-up of a replay."""
        group = WorkerGroup(
            self.count,
            PROFILE,
            self.kv_tokens,
            prefix_wait_tokens=0,
            max_requests=self.max_requests,
        )
        work = WorkloadSpec(self.source, requests=self.requests)
        router = RouterSettings(**dict(self.limits))
        size = self.block_size
        return Setup(work, self.policy, (group,), block_size=size, seed=seed, router=router)


def advise(
    log: Path,
    setup: Setup,
    *,
    draws: int = DRAWS,
    kept: Sequence[ForecastLine] = (),
    check_only: bool = False,
    targets: Targets | None = None,
    jobs: int | None = None,
) -> Advice:
    """Return the advice on a log that `setup` wrote."""
    work = WorkloadSpec(str(log), format="requests", resample=True)
    asked = AdviceRequest(
        base=msgspec.structs.replace(setup, workload=work),
        recorded=read_recorded(opened(log).lines(ErrorLog(str(log)))),
        draws=draws,
        kept=tuple(kept),
        check_only=check_only,
        targets=targets,
    )
    with RunResults(RunOptions(jobs=jobs), Console(file=StringIO())) as runs:
        return Adviser(asked, runs).advise()


def advice_on(case: Case, folder: Path, seed: int = 1, **more: object) -> Advice:
    """Replay the case, write its log, and return the advice on it."""
    log = folder / f"{case.name}.jsonl"
    log_of(case.setup(seed), log)
    return advise(log, case.setup(seed), **more)  # type: ignore[arg-type]


def held(case: Case, advice: Advice, folder: Path, seed: int) -> Advice:
    """Make the change that the advice names first, replay other traffic of the same kind, and check
    the forecast.
    """
    first, recorded = advice.findings[0], advice.recorded
    kept = ForecastLine(
        *(advice.log, recorded.first_s, recorded.last_s, advice.running),
        *(first.change, first.forecast),
    )
    work = case.setup(seed).workload
    after = msgspec.structs.replace(first.change.setup, workload=work, seed=seed)
    log = folder / f"{case.name}.later.jsonl"
    log_of(after, log, STARTED_S + DAY_S)
    return advise(log, after, kept=[kept], check_only=True)


CHAT = "gen:sessions?rate=2"
TENANTS = "gen:tenants?rate=3.4&tenants=6"
AGENTS = "gen:agentic?rate=0.2&turns=8"
NESTED = "gen:zipf?rate=6&groups=30&question=600&output=120&system=6000"
SHARED = "gen:shared?rate=5&prefixes=12"
TALKS = "gen:sessions?rate=0.5&turns=6&system=64&context=1500&question=300&output=150&think_s=5"
LONG_TALKS = (
    "gen:sessions?rate=0.6&turns=8&system=64&context=3000&question=200&output=100&think_s=4"
)
A, T = Case("chat", CHAT, "lmetric", count=2), Case("tenants", TENANTS, "lmetric", count=1)
B = Case("agents", AGENTS, "lmetric", count=3)
L = Case("talks", LONG_TALKS, "lmetric", count=2, kv_tokens=200_000)
Z, S = Case("nested", NESTED, "lmetric", count=2), Case("shared", SHARED, "lmetric", count=1)
HEALTHY = (
    *(A, T, B, Z, S),
    *(replace(one, name=f"{one.name}-warmset", policy="warmset") for one in (A, T, B, Z, S)),
)
PLANTED = (
    replace(A, name="policy-1", policy="kv_prefix", kind="policy"),
    replace(L, name="policy-2", policy="round_robin", kind="policy"),
    replace(Z, name="policy-3", policy="random", kind="policy"),
    replace(A, name="threshold-1", limits=(("worker_requests", 3),), kind="threshold"),
    replace(T, name="threshold-2", limits=(("worker_requests", 8),), kind="threshold"),
    replace(Z, name="threshold-3", limits=(("worker_requests", 3),), kind="threshold"),
    replace(A, name="count-1", count=1, kind="workers"),
    replace(T, name="count-2", count=4, requests=1_200, kind="workers"),
    replace(L, name="block-1", source=TALKS, block_size=1024, kind="block size"),
    replace(L, name="block-2", block_size=2048, kind="block size"),
)
