"""The commands `validate` and `calibrate`, which compare the step-time model with real engines."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated

import aiohttp
from msgspec import Struct
from rich.console import Console

from engine.profiles import SUFFIX, profile, write_profile
from engine.wire.events import WireError
from engine.wire.metrics import parse_load
from simulator.calibrate.fit import Observation, constants_table, errors_table, read_step_log
from simulator.calibrate.fit import calibrate as fitted
from simulator.calibrate.probe import Endpoint, probe
from simulator.calibrate.validate import explained, same_ranking, summary, validation_table
from simulator.calibrate.validate import validate as validated
from simulator.cli.flags import Group, Place, Whole, Written, command
from simulator.cli.setups import PROFILE, WORKERS, OpenLoop, TraceAt, workload_of
from simulator.cli.usage import (
    UsageError,
    base_url,
    check_file,
    check_folder,
    check_policy,
    check_profile,
    write_json,
)
from simulator.live.client import first_model
from simulator.live.console import LoadBoard
from simulator.live.load import opened
from simulator.live.scrape import ScrapeError, fetch_text
from simulator.live.stack import StackSettings
from simulator.report.board import Board

METRICS_TIMEOUT_S = 10.0


def _need_scipy() -> None:
    """Raise ModuleNotFoundError at once if scipy is missing, not after minutes of measurements."""
    import scipy.optimize  # noqa: F401  (of the extra `sim`)


VALIDATED = ("round_robin", "hybrid", "warmset")


class Validate(Struct, kw_only=True):
    """The options of `validate`."""

    trace: TraceAt
    policy: Annotated[tuple[str, ...], "SPEC", f"policy; repeat to compare; default: "
        f"{', '.join(VALIDATED)}"
    ] = ()  # fmt: skip
    workers: Annotated[int, "number of workers"] = WORKERS
    profile: Annotated[str, "P", "profile of the workers"] = PROFILE
    kv_tokens: Annotated[
        int | None, "T", "KV tokens that a worker holds; default: the profile's"
    ] = None
    block_size: Annotated[int, "B", "tokens of a KV block"] = 64
    live_speed: Annotated[float, "X", "run the live side X times as fast, below 1 on a slow machine"
    ] = 1.0  # fmt: skip
    out: Annotated[Path, "DIR", "folder for logs of the programs"] = Path("build/validate")
    requests: Annotated[OpenLoop, Group("requests")]
    json: Annotated[Written, "file that gets all figures"] = None


@command(
    "TRACE [--policy SPEC]... [--workers N] [--seconds S] [option]...",
    "example:\n  warmroute-sim validate requests.jsonl --seconds 100\n",
)
async def validate(options: Validate, console: Console) -> bool:
    """Starts timed workers and a router for each policy, sends TRACE to them in real time, replays
    it, and prints the differences and their reasons. Ends with 0 if hit rates are within 2 points,
    mean TTFT is within 15 %, and the policies have the same order live and simulated.
    """
    _need_scipy()
    check_profile(options.profile)
    check_folder("--out", options.out)
    if options.json is not None:
        check_file("--json", options.json)
    policies = tuple(dict.fromkeys(options.policy or VALIDATED))
    for policy in policies:
        check_policy(policy)
    spec = workload_of(options.trace, options.requests)
    workload = opened(spec, Path(options.trace).name, spec.source)
    stack = StackSettings(
        policies[0],
        options.workers,
        options.profile,
        options.live_speed,
        options.block_size,
        options.kv_tokens,
    )
    with LoadBoard(console, len(policies)) as board:
        found = await validated(
            workload,
            spec,
            policies,
            stack,
            options.out / "logs",
            lambda policy: board.start_run(policy, len(workload.jobs)),
            board.note,
        )
    for one in found:
        console.print(validation_table(one))
        for line in explained(one):
            console.print(line, highlight=False)
        console.print()
    console.print(summary(found), highlight=False)
    write_json(options.json, found)
    return same_ranking(found) and all(one.passed for one in found)


class LiveEngine(Struct):
    """The options for measuring a live engine."""

    model: Annotated[
        str | None, "M", "model to ask; default: the first model that the endpoint lists"
    ] = None
    max_num_tokens: Annotated[int, "most prefill tokens of a step, as in the engine's flags"
    ] = 8192  # fmt: skip
    max_prompt_tokens: Annotated[int, "longest prompt to measure"] = 16_384
    vocabulary: Annotated[int, "upper bound of token ids in prompts"] = 10_000
    seed: Annotated[Whole, "seed of the prompts; default 0"] = 0


class Calibrate(Struct, kw_only=True):
    """The options of `calibrate`."""

    source: Annotated[str, Place(), "URL|FILE", "engine at http://HOST:PORT, or a step log (CSV)"]
    out: Annotated[Path | None, "FILE.json", "file that gets the profile"] = None
    name: Annotated[str | None, "NAME", "name of the profile; default: the file's"] = None
    kv_tokens: Annotated[int | None, "T", "KV tokens that the engine holds; default: as its "
        "/metrics say"] = None  # fmt: skip
    like: Annotated[str | None, "P", "profile of a model with the same routed experts; default: "
        "the model is dense"] = None  # fmt: skip
    live: Annotated[LiveEngine, Group("options for a live engine")]


@command(
    "URL|FILE [--out FILE.json] [option]...",
    "examples:\n  warmroute-sim calibrate http://127.0.0.1:8000 --out mine.json\n"
    "  warmroute-sim calibrate steps.csv --kv-tokens 269k --out mine.json\n",
)
async def calibrate(options: Calibrate, console: Console) -> bool:
    """Measures an OpenAI-compatible engine that has no other clients meanwhile (about a minute), or
    reads a step log (`warmroute-engine --step-log`). Fits the constants of the step-time model,
    prints the errors, and writes a profile for --profile and --timed.
    """
    _need_scipy()
    if options.out is not None:
        check_file("--out", options.out)
        if options.out.suffix != SUFFIX:
            raise UsageError(f"--out {options.out}: a profile's name ends in {SUFFIX}")
    if options.like is not None:
        check_profile(options.like)
    like = None if options.like is None else profile(options.like).step_time
    live = re.match(r"https?://", options.source) is not None
    if live:
        observations, kv_tokens = await _measured(options, console)
    else:
        observations, kv_tokens = read_step_log(Path(options.source)), options.kv_tokens
    if kv_tokens is None and options.out is not None:
        raise UsageError("--kv-tokens is needed: nothing says how many tokens the engine holds")
    name = options.name or (options.out.stem if options.out is not None else "calibrated")
    origin = "a live engine" if live else "a step log"
    found = fitted(observations, name, kv_tokens or 1, origin, like)
    console.print(constants_table(found), errors_table(found))
    if options.out is not None:
        write_profile(found.profile, options.out)
        told = f"{options.out}: use it as --profile {options.out}"
        console.print(told, highlight=False, markup=False, soft_wrap=True)
    return True


async def _measured(options: Calibrate, console: Console) -> tuple[list[Observation], int | None]:
    """Return the measurements, and the KV tokens that the engine holds, or None if unknown."""
    url = base_url(options.source)
    live = options.live
    endpoint = Endpoint(
        url=url,
        model=live.model or await first_model(url),
        chunk_tokens=live.max_num_tokens,
        max_prompt_tokens=live.max_prompt_tokens,
        vocabulary=live.vocabulary,
    )
    with Board(console) as board:
        found = await probe(endpoint, live.seed, partial(board.count, f"measuring {url}"))
    return found, options.kv_tokens or await _kv_tokens(url)


async def _kv_tokens(url: str) -> int | None:
    """Return the size of the KV cache in tokens from the engine's metrics, or None if
    they lack it.
    """
    try:
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=METRICS_TIMEOUT_S)
        ) as session:
            return parse_load(await fetch_text(session, url)).kv_capacity_tokens
    except (ScrapeError, WireError):
        return None
