"""From the options of a command line to `Setup`s: what is asked, checked before anything runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import msgspec

from simulator.replay.checks import check_setup
from simulator.replay.errors import ReplayError
from simulator.replay.setup import Goodput, Setup, WorkerGroup, WorkloadSpec, World
from simulator.usage import UsageError, check_policy, check_profile

# By turns, by load alone, by load and caches. `kv_prefix` alone would be a warning, not a choice.
POLICIES = ("round_robin", "least_requests", "hybrid")
PROFILE = "qwen3-32b-h100-tp2"
WORKERS = 8
SEEDS = (1, 2, 3)  # where one is not enough to tell
GENERATED = "gen:"
GENERATED_BLOCK = 16  # tokens a KV block where nothing is recorded, as vLLM's default
ALONE = ("workers", "profile", "kv_tokens", "prefix_wait_tokens")  # options that --group replaces


def setups_of(options: argparse.Namespace) -> list[Setup]:
    """One per policy and seed, policies outermost; raises `UsageError`."""
    setups = [
        setup_of(options, policy, seed)
        for policy in dict.fromkeys(options.policy or POLICIES)
        for seed in dict.fromkeys(options.seed or (0,))
    ]
    for setup in setups:
        try:
            check_setup(setup)
        except ReplayError as error:
            raise UsageError(str(error)) from error
    return setups


def setup_of(options: argparse.Namespace, policy: str, seed: int) -> Setup:
    """The set-up of one policy and seed; raises `UsageError`."""
    check_policy(policy)
    if options.no_events and options.event_loss:
        raise UsageError("--event-loss is of KV events, and with --no-events there are none")
    return Setup(
        workload=workload_of(options),
        policy=policy,
        groups=groups_of(options),
        block_size=_block_size(options),
        seed=seed,
        closed_loop=options.closed_loop,
        world=World(
            network_ms=options.network_ms,
            events=not options.no_events,
            event_lag_ms=options.event_lag_ms,
            event_loss=options.event_loss,
            report_every_ms=options.report_every_ms,
            report_lag_ms=options.report_lag_ms,
            replicas=options.replicas,
            replica_lag_ms=options.replica_lag_ms,
            replicas_share=not options.no_sharing,
        ),
        faults=options.faults,
        goodput=Goodput(options.good_ttft_ms, options.good_tpot_ms),
        native=not options.plain,
    )


def _block_size(options: argparse.Namespace) -> int | None:
    """Generators count in the largest blocks that end where prefixes do, which may be tiny."""
    if options.block_size is None and options.trace.startswith(GENERATED):
        return GENERATED_BLOCK
    block_size: int | None = options.block_size
    return block_size


def workload_of(options: argparse.Namespace) -> WorkloadSpec:
    """Which requests, and when."""
    return WorkloadSpec(
        source=options.trace,
        format=options.format,
        block_tokens=options.block_tokens,
        speed=options.speed or 1.0,
        rate_per_s=options.rate,
        requests=options.requests,
        skip_s=options.skip,
        seconds=options.seconds,
        spread_s=options.spread or 0.0,
        strict=options.strict,
    )


def groups_of(options: argparse.Namespace) -> tuple[WorkerGroup, ...]:
    """The pool; raises `UsageError` for a --group that says too much, too little or nonsense."""
    if not options.group:
        workers = options.workers or WORKERS
        if options.profile is not None:
            check_profile(options.profile)
        return (
            WorkerGroup(
                workers,
                options.profile or PROFILE,
                options.kv_tokens,
                prefix_wait_tokens=options.prefix_wait_tokens,
            ),
        )
    for name in ALONE:
        if getattr(options, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} belongs into --group where there is one")
    return tuple(_group(text) for text in options.group)


def _group(text: str) -> WorkerGroup:
    pairs: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key.strip() in pairs:
            raise UsageError(f"--group {text}: {part!r} is not key=value, or is given twice")
        pairs[key.strip()] = value.strip()
    try:
        return msgspec.convert({"profile": PROFILE, **_plain(pairs)}, WorkerGroup, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(WorkerGroup.__struct_fields__)
        raise UsageError(f"--group {text}: {error}; keys: {known}") from error


def _plain(pairs: dict[str, str]) -> dict[str, str]:
    """300k and 2M written out."""
    factors: Sequence[tuple[str, str]] = (("k", "000"), ("M", "000000"))
    found = dict(pairs)
    for key, value in pairs.items():
        for suffix, zeros in factors:
            if value[:-1].isdigit() and value.endswith(suffix):
                found[key] = value[:-1] + zeros
    return found
