"""The command `advise`: recommends a change of the pool, from the router's own request log."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import msgspec
from msgspec import Struct
from rich.console import Console

from policies.facts import Role
from simulator.cli.flags import Group, NotNegative, Place, Whole, Written, command
from simulator.cli.setups import PROFILE, Pool, Requests, SetupOptions, known, setup_of
from simulator.cli.usage import UsageError, check_files, write_json
from simulator.replay.fleet import check_setup
from simulator.replay.setup import Setup, WorkerGroup
from simulator.runs.advice import Advice, advice_parts, keep, read_forecasts, state_path
from simulator.runs.advise import DRAWS, TARGETS, AdviceRequest, Adviser
from simulator.runs.plan import Targets, shown
from simulator.runs.runs import RunOptions, RunResults
from simulator.traces.files import opened
from simulator.traces.job import ErrorLog
from simulator.traces.request_log import Recorded, read_recorded
from simulator.workloads.open import open_jobs

EXAMPLES = """\
examples:
  warmroute-sim advise requests.jsonl --profile llama-3.1-8b-h100
  warmroute-sim advise requests.jsonl --profile mine.json --ttft-p90-ms 1000 --json advice.json
  warmroute-sim advise later.jsonl --profile mine.json --state requests.jsonl.advice --check
"""


class AdvisedTargets(Targets, frozen=True):
    """The targets of a pool in service, where some requests may be lost."""

    max_lost_share: Annotated[float, "largest share of requests that may be rejected or lost"] = (
        0.01
    )


class LogPool(Pool):
    """The workers that ran when the log was written."""

    workers: Annotated[int | None, "number of workers that prefill and decode; default: as in the "
        "log, 0 beside workers with roles"] = None  # fmt: skip


class LogPart(Requests):
    """The part of a log to replay; its times were measured, so it is never sped up or
    slowed down.
    """

    format: str = "auto"
    tokenizer: str | None = None
    block_tokens: int | None = None
    speed: float | None = None
    rate: float | None = None
    spread: float | None = None
    skip: Annotated[NotNegative, "S", "leave out the first S seconds of LOG"] = 0.0
    seconds: Annotated[float | None, "use only the first S seconds of LOG"] = None
    closed_loop: Annotated[bool, "a session's next turn waits for the last answer"] = False
    strict: Annotated[bool, "stop at the first wrong line of LOG"] = False


class LogSetup(SetupOptions, kw_only=True):
    """The replay of a log; the options supply what the log lacks."""

    trace: Annotated[str, Place(), "LOG", "the router's request log: file, folder or pattern of "
        "parts"]  # fmt: skip
    pool: Annotated[LogPool, Group("workers")]
    requests: Annotated[LogPart, Group("requests")]


class Advise(Struct, kw_only=True):
    """The options of `advise`."""

    model: Annotated[str | None, "NAME", "model to advise on; needed if LOG has several models"
    ] = None  # fmt: skip
    policy: Annotated[str | None, "SPEC", "policy that ran; default: the policy in LOG"] = None
    candidate: Annotated[tuple[str, ...], "SPEC", "policy to try besides the built-in policies; "
        "repeat for several"
    ] = ()  # fmt: skip
    draws: Annotated[
        int,
        "number of draws of LOG: half of the draws choose the best change, half test the change",
    ] = DRAWS
    seed: Annotated[Whole, "seed of the first draw"] = 0
    budget: Annotated[float | None, "S", "longest time of the command, seconds; advise makes "
        "fewer draws if needed"] = None  # fmt: skip
    jobs: Annotated[int | None, "number of processes; default: one for each core"] = None
    check: Annotated[bool, "only compare earlier forecasts with LOG"] = False
    state: Annotated[Path | None, "file that keeps the forecasts; default: LOG.advice"] = None
    any_fit: Annotated[bool, "advise even if a replay of LOG differs from LOG's measurements"
    ] = False  # fmt: skip
    nice: Annotated[Whole, "lower the priority of the processes by N"] = 0
    memory_mb: Annotated[int | None, "largest memory of each process, MB"] = None
    targets: Annotated[AdvisedTargets, Group(f"targets; default: {', '.join(shown(TARGETS))}")]
    setup: LogSetup
    worker_requests: Annotated[int | None, "limits.worker_requests of the router that wrote LOG; "
        "default: as in LOG"
    ] = None  # fmt: skip
    worker_queued_tokens: Annotated[int | None, "limits.worker_queued_tokens of the router that "
        "wrote LOG; default: as in LOG"] = None  # fmt: skip
    json: Annotated[Written, "file that gets the report, as the admin page reads it"] = None


@command("LOG [--profile P] [targets] [--candidate SPEC]... [option]...", EXAMPLES + known())
def advise(options: Advise, console: Console) -> bool:
    """Replays random draws of LOG, the router's request log, as it ran and with one thing changed:
    policy, thresholds, block size, roles or number of workers. Prints the changes that are clearly
    better, by how much, and how to make them; or that there are none. Half of the draws choose the
    best change of each kind, the other half judge it. Forecasts are kept beside the log, and
    compared with the log that is written after the change.
    """
    _lower_priority(options)
    log = options.setup.trace
    model = "" if options.model is None else f"?model={quote(options.model, safe='')}"
    options.setup.requests.format = f"requests{model}"
    check_files([log], json=options.json, state=options.state)
    errors = ErrorLog(log)
    recorded = read_recorded(opened(Path(log)).lines(errors), options.model)
    asked = AdviceRequest(
        base=_base_of(options, recorded),
        recorded=_measured(options.setup.requests, recorded),
        policies=tuple(dict.fromkeys(options.candidate)),
        targets=options.targets if options.targets.has_limits else None,
        draws=options.draws,
        seed=options.seed,
        seconds=options.budget,
        kept=tuple(read_forecasts(options.state or state_path(log))),
        check_only=options.check,
        any_fit=options.any_fit,
    )
    with RunResults(RunOptions(jobs=options.jobs), console) as runs:
        advice = Adviser(asked, runs).advise()
    for part in advice_parts(advice, console.width):
        console.print(part, highlight=False, markup=False, soft_wrap=True)
    _write_advice(options, console, advice)
    return True


def _lower_priority(options: Advise) -> None:
    """Lower the priority and the memory limit of this process and its children, if options ask for
    it.
    """
    if options.nice:
        os.nice(options.nice)
    if options.memory_mb is not None:
        most = options.memory_mb << 20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _base_of(options: Advise, recorded: Recorded) -> Setup:
    """Return the set-up that ran, from the options, else from the log.

    Raises `UsageError` if neither says it.
    """
    trace, pool = options.setup.trace, options.setup.pool
    policy = options.policy or (recorded.policies[-1] if recorded.policies else None)
    if not recorded.requests:
        raise UsageError(f"{trace}: holds no requests{_of(options.model)}")
    if policy is None:
        raise UsageError(f"{trace}: does not say which policy ran; give --policy")
    named = ("workers", "prefill_workers", "decode_workers", "group")
    if not any(getattr(pool, name) for name in named):
        if recorded.workers is None:
            raise UsageError(f"{trace}: does not say how many workers ran; give --workers")
        pool.workers = recorded.workers
    setup = setup_of(options.setup, policy, options.seed)
    if recorded.fleet and pool.workers == recorded.workers:
        setup = msgspec.structs.replace(setup, groups=_recorded_groups(pool, recorded))
    limits = {
        name: value
        for name in ("worker_requests", "worker_queued_tokens")
        if (value := getattr(options, name) or getattr(recorded, name)) is not None
    }
    router = msgspec.structs.replace(setup.router, **limits)
    work = msgspec.structs.replace(setup.workload, resample=True)
    size = setup.block_size or open_jobs(setup.workload).block_tokens
    setup = msgspec.structs.replace(setup, workload=work, block_size=size, router=router)
    check_setup(setup)
    return setup


def _of(model: str | None) -> str:
    return "" if model is None else f" of the model {model}"


def _recorded_groups(pool: Pool, recorded: Recorded) -> tuple[WorkerGroup, ...]:
    return tuple(
        WorkerGroup(
            part.count,
            pool.profile or PROFILE,
            pool.kv_tokens or part.kv_tokens,
            prefix_wait_tokens=pool.prefix_wait_tokens,
            max_requests=part.max_requests,
            max_queued_tokens=part.max_queued_tokens,
            max_kv_fraction=part.max_kv_fraction,
            role=msgspec.convert(part.role, Role),
        )
        for part in recorded.fleet
    )


def _measured(part: LogPart, recorded: Recorded) -> Recorded:
    """Return the record without the latencies and hits that clients saw if only a part of the log
    is replayed, because these describe the whole log.
    """
    if part.requests or part.skip or part.seconds:
        return msgspec.structs.replace(recorded, ttft_ms=None, hit_rate=None)
    return recorded


def _write_advice(options: Advise, console: Console, advice: Advice) -> None:
    """Keep the forecast, and write the advice as JSON if the options ask for that. The JSON file
    appears only when it is complete.
    """
    path = options.state or state_path(options.setup.trace)
    try:
        keep(path, advice)
    except OSError as error:
        told = f"{path}: the forecast is not kept: {error.strerror}; --state FILE"
        console.print(told, style="yellow", highlight=False, markup=False, soft_wrap=True)
    if options.json is not None:
        part = options.json.with_name(f"{options.json.name}.part")
        write_json(part, advice)
        part.replace(options.json)
