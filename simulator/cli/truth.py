"""The commands `validate` and `calibrate`, which hold the model beside the real thing."""

from __future__ import annotations

import argparse
import re
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
from rich.console import Console

from engine.profiles import SUFFIX, write_profile
from engine.wire.events import WireError
from engine.wire.metrics import parse_load
from simulator.calibrate.fit import Observation, constants_table, errors_table, read_step_log
from simulator.calibrate.fit import calibrate as fitted
from simulator.calibrate.probe import Endpoint, probe
from simulator.calibrate.validate import explained, same_ranking, summary, validation_table
from simulator.calibrate.validate import validate as validated
from simulator.cli.replay_options import workload_of
from simulator.cli.study_options import VALIDATED
from simulator.cli.usage import (
    UsageError,
    base_url,
    check_file,
    check_folder,
    check_policy,
    check_profile,
)
from simulator.live.client import first_model
from simulator.live.console import LoadBoard
from simulator.live.load import opened
from simulator.live.scrape import ScrapeError, fetch_text
from simulator.live.stack import StackSettings
from simulator.report.board import Board

METRICS_TIMEOUT_S = 10.0


def _need_scipy() -> None:
    """Raise ModuleNotFoundError at once, not after minutes of measurements."""
    import scipy.optimize  # noqa: F401  (of the extra `sim`)


async def validate(options: argparse.Namespace, console: Console) -> bool:
    """Runs each policy live and simulated; whether they agree."""
    _need_scipy()
    check_profile(options.profile)
    check_folder("--out", options.out)
    if options.json is not None:
        check_file("--json", options.json)
    policies = tuple(dict.fromkeys(options.policy or VALIDATED))
    for policy in policies:
        check_policy(policy)
    spec = workload_of(options)
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
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return same_ranking(found) and all(one.passed for one in found)


async def calibrate(options: argparse.Namespace, console: Console) -> bool:
    """Fits the step-time model, prints the errors, writes the profile."""
    _need_scipy()
    if options.out is not None:
        check_file("--out", options.out)
        if options.out.suffix != SUFFIX:
            raise UsageError(f"--out {options.out}: a profile's name ends in {SUFFIX}")
    live = re.match(r"https?://", options.source) is not None
    if live:
        observations, kv_tokens = await _measured(options, console)
    else:
        observations, kv_tokens = read_step_log(Path(options.source)), options.kv_tokens
    if kv_tokens is None and options.out is not None:
        raise UsageError("--kv-tokens is needed: nothing says how many tokens the engine holds")
    name = options.name or (options.out.stem if options.out is not None else "calibrated")
    origin = "a live engine" if live else "a step log"
    found = fitted(observations, name, kv_tokens or 1, origin)
    console.print(constants_table(found), errors_table(found))
    if options.out is not None:
        write_profile(found.profile, options.out)
        told = f"{options.out}: use it as --profile {options.out}"
        console.print(told, highlight=False, markup=False, soft_wrap=True)
    return True


async def _measured(
    options: argparse.Namespace, console: Console
) -> tuple[list[Observation], int | None]:
    """The measurements, and the KV tokens that the engine holds as far as anybody says."""
    url = base_url(options.source)
    endpoint = Endpoint(
        url=url,
        model=options.model or await first_model(url),
        chunk_tokens=options.max_num_tokens,
        max_prompt_tokens=options.max_prompt_tokens,
        vocabulary=options.vocabulary,
    )
    with Board(console) as board:
        found = await probe(endpoint, options.seed, partial(board.count, f"measuring {url}"))
    return found, options.kv_tokens or await _kv_tokens(url)


async def _kv_tokens(url: str) -> int | None:
    """What the engine's metrics say of its KV cache; None where they do not."""
    try:
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=METRICS_TIMEOUT_S)
        ) as session:
            return parse_load(await fetch_text(session, url)).kv_capacity_tokens
    except (ScrapeError, WireError):
        return None
