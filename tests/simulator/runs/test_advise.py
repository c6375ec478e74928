"""Tests of advice on a log: which changes are tried and clear, which logs are refused, whether
forecasts came true, and planted mistakes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from simulator.replay.run import replay
from simulator.replay.setup import RouterSettings, Setup, WorkerGroup
from simulator.report.figures import Interval, Ratio
from simulator.report.row import summarize
from simulator.runs import advise as search
from simulator.runs.advice import (
    Forecast,
    Tried,
    advice_parts,
    another,
    read_forecasts,
    short,
    state_path,
)
from simulator.runs.task import SweepError
from simulator.traces.job import Job
from simulator.traces.request_log import continued, read_recorded
from simulator.traces.spec import WorkloadSpec
from simulator.workloads.open import open_jobs
from tests.simulator.cli_support import Run, run
from tests.simulator.replays import PROFILE
from tests.simulator.runs.advised import HEALTHY, PLANTED, advice_on, advise, held
from tests.simulator.runs.logged import log_of
from tests.simulator.trace_lines import LOG_HEADING, LOGGED

__all__ = ["run"]  # a fixture
CHAT, TENANTS = HEALTHY[0], HEALTHY[1]
FEW = {"draws": 6}


def base(policy: str = "lmetric", *groups: WorkerGroup, **more: object) -> Setup:
    made = {"block_size": 16, **more}
    return Setup(WorkloadSpec("log"), policy, groups or (WorkerGroup(2, PROFILE),), **made)


def titles(setup: Setup, kind: str) -> list[str]:
    return [one.title for one in search.candidates(setup) if one.kind == kind]


def test_each_candidate_changes_one_thing_and_has_instructions() -> None:
    group = WorkerGroup(3, PROFILE, max_requests=8.0, max_kv_fraction=0.5)
    setup = base("hybrid?load_factor=3", group, block_size=256)
    made = search.candidates(setup, ["preble"])
    assert all(change.do and change.setup != setup for change in made)
    assert len({(change.kind, change.title) for change in made}) == len(made)
    policies = titles(setup, "policy")
    assert policies[0] == "hybrid instead of hybrid?load_factor=3"  # its own defaults first
    assert titles(base("lmetric"), "policy")[0] == "warmset instead of lmetric"
    assert titles(setup, "threshold") == [
        "no max_requests instead of 8",
        "max_requests=4 instead of 8",
        "max_requests=32 instead of 8",
        "no max_kv_fraction instead of 0.5",
        "max_kv_fraction=0.9 instead of 0.5",
        "limits.worker_requests=64 instead of none",
    ]
    assert titles(setup, "block size") == [
        "64 tokens instead of 256",
        "16 tokens instead of 256",
    ]
    assert titles(base(block_size=16), "block size") == []


def test_a_limit_of_the_router_is_varied_like_a_threshold() -> None:
    setup = base(router=RouterSettings(worker_requests=2))
    names = [title for title in titles(setup, "threshold") if "worker_requests" in title]
    assert names == [
        "no limits.worker_requests instead of 2",
        "limits.worker_requests=1 instead of 2",
        "limits.worker_requests=8 instead of 2",
    ]
    freed = search.candidates(setup)
    assert any(one.setup.router == RouterSettings() for one in freed)


def test_role_candidates_move_one_worker_or_remove_the_roles() -> None:
    groups = (WorkerGroup(1, PROFILE, role="prefill"), WorkerGroup(3, PROFILE, role="decode"))
    assert titles(base("lmetric", *groups), "roles") == [
        "2 prefill + 2 decode instead of 1 prefill + 3 decode",
        "all of a request at one worker instead of 1 prefill + 3 decode",
    ]


def test_the_last_policy_of_a_log_and_its_requests_count() -> None:
    """If a log has several policies, the last one counts, and only its requests are measured. A
    router writes a header whenever it reloads; a header with another policy starts a new count.
    """

    def line(ttft_ms: float, cached: int) -> dict[str, Any]:
        told = {"ttft_ms": ttft_ms, "cached_tokens": cached, "worker_prompt_tokens": 40}
        return LOGGED | told

    lines = [
        {**LOG_HEADING, "policy": "kv_prefix", "workers": 2},
        line(900.0, 0),
        {**LOG_HEADING, "policy": "warmset", "workers": 2},
        line(100.0, 20),
        {**LOG_HEADING, "policy": "warmset", "workers": 3},
        line(300.0, 40),
    ]
    found = read_recorded((n, json.dumps(one).encode() + b"\n") for n, one in enumerate(lines, 1))
    assert (found.policies, found.workers) == (("kv_prefix", "warmset"), 3)
    assert (found.requests, found.under_last) == (3, 2)
    assert (found.ttft_ms, found.hit_rate) == (200.0, 0.75)
    back = read_recorded(
        (0, json.dumps(one).encode() + b"\n") for one in (*lines, lines[0], line(500.0, 10))
    )
    assert back.policies == ("warmset", "kv_prefix")
    assert (back.under_last, back.ttft_ms, back.hit_rate) == (1, 500.0, 0.25)


def forecast(ttft: tuple[float, float, float], good: tuple[float, float, float]) -> Forecast:
    between, points = Interval(*ttft, 6), Interval(*good, 6)
    return Forecast(Ratio(*ttft, 6), between, points, points)


@pytest.mark.parametrize(
    ("ttft", "good", "clear"),
    [
        ((0.8, 0.7, 0.9), (0.0, -0.01, 0.01), True),
        ((0.8, 0.6, 1.01), (0.0, -0.01, 0.01), False),  # not beyond its interval
        ((0.97, 0.96, 0.98), (0.0, -0.01, 0.01), False),  # too little to change anything for
        ((0.8, 0.7, 0.9), (-0.03, -0.04, -0.02), False),  # at the cost of good answers
        ((1.0, 0.9, 1.1), (0.05, 0.03, 0.07), True),
        ((1.2, 1.1, 1.3), (0.05, 0.03, 0.07), False),
    ],
)
def test_a_change_is_clear_if_it_helps_beyond_its_interval_at_no_cost(
    ttft: tuple[float, float, float], good: tuple[float, float, float], clear: bool
) -> None:
    assert search.is_clear(forecast(ttft, good)) is clear


@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=20))
def test_the_interval_for_another_recording_contains_the_mean(sample: list[float]) -> None:
    found = another(sample, least=0.0)
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert 0.0 <= found.low <= found.mean <= found.high


def test_a_specification_is_shown_without_defaults() -> None:
    assert short("hybrid?load_factor=1.0&temperature=0.0") == "hybrid"
    assert short("hybrid?load_factor=2.0|bounded_load?epsilon=0.25") == (
        "hybrid?load_factor=2.0|bounded_load"
    )
    assert short("nobody_has_it?x=1") == "nobody_has_it?x=1"


def test_turns_show_the_blocks_that_answers_added_to_the_cache(tmp_path: Path) -> None:
    """A replay of a log has the hit rate of the replay that wrote it, because turns tell what
    answers added to the cache.
    """
    log = tmp_path / "log.jsonl"
    setup = CHAT.setup(3)
    wrote = summarize(log_of(setup, log))
    for form, whole in (("requests", True), ("requests?turns=false", False)):
        work = WorkloadSpec(str(log), format=form)
        again = summarize(replay(msgspec.structs.replace(setup, workload=work)))
        same = again.hit_rate_tokens == pytest.approx(wrote.hit_rate_tokens, abs=0.003)
        assert same is whole


def test_turns_give_partial_blocks_the_names_of_later_turns() -> None:
    def job(tokens: int, ids: list[int], output: int = 4) -> Job:
        return Job(0, tokens, output, np.array(ids, dtype=np.uint64), session="s")

    first, second, other = continued([job(20, [1]), job(40, [1, 2]), job(40, [9, 8])], 16)
    assert first.ids.tolist() == [1, 2]
    assert first.answer_ids.tolist() == [2]
    assert second.ids.tolist()[:2] == [1, 2]
    assert len(second.ids) == 3  # its last, partial block has a name of its own
    assert not len(second.answer_ids)  # the next prompt does not continue its answer
    assert other.ids.tolist()[:2] == [9, 8]


def test_turns_are_found_in_a_log_with_few_lines_read_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turns of sessions are found in a log although only a few lines are read ahead. Two sessions
    alternate; every turn adds two blocks, the second of which comes from its answer.
    """
    jobs = [
        Job(turn, 24 + 32 * turn, 16, np.arange(1 + 2 * turn, dtype=np.uint64) + 100, session=name)
        for turn in range(12)
        for name in "ab"
    ]
    whole = list(continued(jobs, 16))
    monkeypatch.setattr("simulator.traces.request_log.LOOK_AHEAD_JOBS", 4)
    parts = list(continued(iter(jobs), 16))
    assert [job.at_ns for job in parts] == [job.at_ns for job in jobs]
    for one, other in zip(whole, parts, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.answer_ids.tolist() == other.answer_ids.tolist()


# --- what is refused -----------------------------------------------------------------------------

POOL = ("--profile", PROFILE, "--prefix-wait-tokens", "0")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("advise") / "log.jsonl"
    log_of(TENANTS.setup(1), path)
    return path


def lines_of(log: Path) -> list[bytes]:
    return log.read_bytes().splitlines(keepends=True)


def refused(run: Run, tmp_path: Path, data: bytes, *more: object) -> str:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(data)
    said = run("advise", path, *POOL, *more)
    assert said.status == 2, said
    assert not (tmp_path / "bad.jsonl.advice").exists()
    return said.err


def test_unusable_logs_are_refused_with_the_reason(run: Run, tmp_path: Path, log: Path) -> None:
    lines = lines_of(log)
    assert "holds no requests" in refused(run, tmp_path, b"")
    assert "holds no requests" in refused(run, tmp_path, lines[0])
    assert "was cut off" in refused(run, tmp_path, b"".join(lines)[:-40])
    assert "too short to tell: 50 requests" in refused(run, tmp_path, b"".join(lines[:51]))
    other = [line.replace(b'"model":"m"', b'"model":"b"') for line in lines[1:]]
    both = b"".join([*lines, *other])
    assert "several models: b (400), m (400); choose one" in refused(run, tmp_path, both)
    assert "holds no requests of the model c" in refused(run, tmp_path, both, "--model", "c")
    assert "does not say which policy" in refused(run, tmp_path, b"".join(lines[1:]))
    unlike = [line.replace(b'"ttft_ms":', b'"ttft_ms":9') for line in lines]
    assert "the model does not fit" in refused(run, tmp_path, b"".join(unlike))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--link-gbps", 0), "0 is not a number above 0"),
        (("--ttft-p90-ms", 900, "--ttft-p99-ms", 300), "contradict"),
        (("--tpot-mean-ms", 0.01), "nobody can keep it"),
        (("--draws", 2), "expected 6 to 200"),
        (("--candidate", "nope"), "no policy 'nope'"),
        (("--budget", 0.01), "give more --budget"),
    ],
)
def test_impossible_options_are_refused(
    run: Run, log: Path, options: tuple[object, ...], message: str
) -> None:
    said = run("advise", log, *POOL, *options)
    assert said.status == 2
    assert message in said.err


# --- planted mistakes ------------------------------------------------------------------------


def grouped(log: Path) -> Path:
    """Give each three sessions of a log one group: a main agent and its two sub-agents."""
    lines, numbers = [], dict[str, int]()
    for raw in log.read_bytes().splitlines():
        line = msgspec.json.decode(raw)
        if (session := line.get("session")) is not None:
            number = numbers.setdefault(session, len(numbers))
            line["group"] = f"g{number // 3}"
            if number % 3:
                line |= {"parent": line["group"], "final": True}
        lines.append(msgspec.json.encode(line) + b"\n")
    log.write_bytes(b"".join(lines))
    return log


def test_a_log_with_groups_is_replayed_with_them(tmp_path: Path, log: Path) -> None:
    copied = tmp_path / "log.jsonl"
    copied.write_bytes(log.read_bytes())
    jobs = list(open_jobs(WorkloadSpec(str(grouped(copied)), format="requests"), 0).jobs)
    children = [job for job in jobs if job.parent is not None]
    assert children
    assert all(job.group is not None for job in jobs)
    assert all(job.final and job.parent == job.group for job in children)
    assert {job.parent for job in children} <= {job.group for job in jobs}


def test_a_mistake_is_found_and_its_forecast_is_compared_with_the_result(tmp_path: Path) -> None:
    case = replace(PLANTED[0], requests=300)
    log_of(case.setup(1), log := tmp_path / "log.jsonl")
    advice = advise(grouped(log), case.setup(1), **FEW)
    first = advice.findings[0]
    assert first.change.kind == "policy"
    assert advice.keeps is False
    assert first.forecast.task is not None
    assert first.forecast.fairness is not None
    assert first.forecast.task.mean < 1
    said = "\n".join(str(part) for part in advice_parts(advice, 160))
    assert "; mean task " in said
    assert "   mean task x 0." in said
    later = held(case, advice, tmp_path, 101)
    assert [check.title for check in later.checks] == [advice.findings[0].change.title]
    assert later.checks[0].happened is not None
    said = "\n".join(str(part) for part in advice_parts(later, 160))
    assert "forecast of policy" in said
    lucky, best = Tried("policy", "on two draws", 2, -9.0), Tried("policy", "on three", 3, -5.0)
    console = Console(file=StringIO(), width=160)
    console.print(*advice_parts(msgspec.structs.replace(advice, tried=(lucky, best)), 160))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "on three -5.00" in said
    assert "on two draws" not in said


def test_advice_to_change_nothing_keeps_no_forecast(run: Run, tmp_path: Path, log: Path) -> None:
    """The command reads pool, policy and block size from the log alone; on this log it advises no
    change.
    """
    out = tmp_path / "advice.json"
    state = tmp_path / "state"
    said = run("advise", log, *POOL, "--draws", 6, "--json", out, "--state", state)
    assert said.status == 0, said
    assert "Change nothing" in said.out
    assert not state.exists()
    answer = json.loads(out.read_bytes())
    assert answer["format"] == "warmroute-advice"
    assert answer["running"]["groups"][0]["count"] == TENANTS.count
    assert answer["findings"] == []


def test_forecasts_have_one_file_for_a_log(tmp_path: Path) -> None:
    assert state_path("a/log.jsonl") == Path("a/log.jsonl.advice")
    assert state_path("a/traffic/") == Path("a/traffic.advice")
    assert state_path("a/requests-*") == Path("a.advice")
    assert read_forecasts(tmp_path / "none") == []
    (tmp_path / "bad").write_text("no\n")
    with pytest.raises(SweepError, match="not a forecast"):
        read_forecasts(tmp_path / "bad")


@pytest.mark.full
@pytest.mark.timeout(7_200)
def test_ten_mistakes_are_found_and_ten_healthy_pools_get_no_advice(tmp_path: Path) -> None:
    found, within, halves = [], [], []
    for case in PLANTED:
        advice = advice_on(case, tmp_path)
        kind = advice.findings[0].change.kind if advice.findings else None
        found.append(kind == case.kind)
        if advice.findings:
            next_ttft = advice.findings[0].forecast.next_ttft
            halves.append((next_ttft.high - next_ttft.low) / 2)
            within += [check.within for check in held(case, advice, tmp_path, 101).checks]
    healthy = [advice_on(case, tmp_path) for case in HEALTHY]
    quiet = [not advice.findings for advice in healthy]
    print(f"\nfound {sum(found)}, quiet {sum(quiet)}, within {sum(within)}, halves {halves}")
    assert sum(found) >= 9
    assert all(advice.keeps for advice in healthy)
    assert sum(quiet) >= 9
    assert sum(within) >= 0.9 * len(within)
    assert max(halves) <= 0.15
