"""Options of `replay`, those that other commands share, and the `Setup`s made of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, TypeVar, get_args

import msgspec

from engine.profiles import PROFILES
from policies.facts import Role
from policies.load import names, wrapper_names
from router.core.contract.settings import CoreSettings, Disaggregation
from simulator.cli import usage as arguments
from simulator.cli.usage import (
    HELP_COLUMNS,
    UsageError,
    add_command,
    check_policy,
    check_profile,
    from_module,
)
from simulator.replay.fleet import check_setup
from simulator.replay.setup import (
    HOST_LOAD_GBPS,
    Goodput,
    ReplayError,
    RouterSettings,
    Setup,
    WorkerGroup,
    World,
)
from simulator.traces.formats import FORMATS
from simulator.traces.spec import WorkloadSpec

T = TypeVar("T")

# By turns, by load alone, by load and caches, and what a router does that nobody told otherwise.
# `kv_prefix` alone would be a warning, not a choice.
POLICIES = ("round_robin", "least_requests", "hybrid", "warmset")
PROFILE = "qwen3-32b-h100-tp2"
WORKERS = 8
MAX_DRAWS = 10_000
SEEDS = (1, 2, 3)  # where one is not enough to tell
GENERATED = "gen:"
GENERATED_BLOCK = 16  # tokens a KV block where nothing is recorded, as vLLM's default
# Options that --group replaces.
ALONE = (
    *("workers", "prefill_workers", "decode_workers", "profile", "kv_tokens"),
    *("prefix_wait_tokens", "host_kv_tokens", "host_load_gbps"),
)


def setups_of(options: argparse.Namespace) -> list[Setup]:
    """One per policy and seed, policies outermost; raises `UsageError`."""
    setups = [
        setup_of(options, policy, seed)
        for policy in dict.fromkeys(options.policy or POLICIES)
        for seed in _seeds(options)
    ]
    for setup in setups:
        try:
            check_setup(setup)
        except ReplayError as error:
            raise UsageError(str(error)) from error
    return setups


def _seeds(options: argparse.Namespace) -> Sequence[int]:
    """As they were named, or so many from the first on."""
    named = list(dict.fromkeys(options.seed or (0,)))
    if options.resamples is None:
        return named
    if len(named) > 1:
        raise UsageError("--resamples takes the seeds that follow one --seed; name one at most")
    if options.resamples < 2:
        raise UsageError("--resamples: 2 or more, for one draw has no interval; --resample is one")
    return range(named[0], named[0] + options.resamples)


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
            link_gbps=options.link_gbps,
            link_setup_ms=options.link_setup_ms,
            replicas=options.replicas,
            replica_lag_ms=options.replica_lag_ms,
            replicas_share=not options.no_sharing,
            host_events=False if options.no_host_events else msgspec.UNSET,
            untold_capacities=options.untold_capacities or msgspec.UNSET,
        ),
        faults=options.faults,
        goodput=Goodput(options.good_ttft_ms, options.good_tpot_ms),
        router=RouterSettings(
            hold_s=options.hold_s,
            disaggregation=options.disaggregation,
            tpot_s=options.disaggregation_tpot_ms / 1e3,
        ),
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
        resample=_resample(options),
    )


def _resample(options: argparse.Namespace) -> bool | msgspec.UnsetType:
    """Of a file as asked; a generator makes other requests with every seed as it is."""
    several = getattr(options, "resamples", None) and not options.trace.startswith(GENERATED)
    return True if getattr(options, "resample", False) or several else msgspec.UNSET


def groups_of(options: argparse.Namespace) -> tuple[WorkerGroup, ...]:
    """The pool; raises `UsageError` for a --group that says too much, too little or nonsense."""
    if not options.group:
        if options.profile is not None:
            check_profile(options.profile)
        roles: dict[Role, int | None] = {
            "both": options.workers,
            "prefill": options.prefill_workers,
            "decode": options.decode_workers,
        }
        if not any(roles.values()):
            roles["both"] = WORKERS
        return tuple(
            WorkerGroup(
                count,
                options.profile or PROFILE,
                options.kv_tokens,
                prefix_wait_tokens=options.prefix_wait_tokens,
                role=role,
                host_kv_tokens=_or_unset(options.host_kv_tokens),
                host_load_gbps=_or_unset(options.host_load_gbps),
            )
            for role, count in roles.items()
            if count
        )
    for name in ALONE:
        if getattr(options, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} belongs into --group where there is one")
    return tuple(_group(text) for text in options.group)


def _or_unset(value: T | None) -> T | msgspec.UnsetType:
    return msgspec.UNSET if value is None else value


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


_WORLD, _GOODPUT = World(), Goodput()

EXAMPLES = """\
TRACE is a file (JSON lines or CSV; plain, gzip or zstd; the format is found by looking) or a
generator, as gen:sglang?groups=64. `warmroute-sim sources` lists all of both.

examples:
  warmroute-sim replay requests.jsonl
  warmroute-sim replay requests.jsonl --policy hybrid --policy kv_load --workers 12 --html r.html
  warmroute-sim replay requests.jsonl --policy warmset --policy lmetric --resamples 10
  warmroute-sim replay requests.jsonl --rate 12 --seed 0 --seed 1 --seed 2 --json r.json
  warmroute-sim replay sessions.jsonl.gz --closed-loop --kv-tokens 300k --faults faults.yaml
  warmroute-sim replay gen:sglang --group count=6,profile=qwen3-32b-h100-tp2 \\
      --group count=2,profile=qwen3-32b-h200-tp2
"""


def add_replay(parsers: Any) -> None:
    """`warmroute-sim replay`."""
    parser = add_command(
        parsers,
        "replay",
        "TRACE [--policy SPEC]... [--workers N] [--profile P] [option]...",
        "what each policy would have given for a trace, on virtual time",
        "Replays the requests of TRACE through the router's own decision core and policies and "
        "the engine's own scheduler, with modelled step times, and prints latency, hits and "
        "balance for each policy. No GPU, no waiting. Ends with 1 where a replay leaves more than "
        "half of its requests without a whole answer.",
        EXAMPLES + known(),
    )
    add_source(parser)
    add_policies(parser, seeds="0")
    parser.add_argument(
        "--resamples", type=arguments.at_most(MAX_DRAWS), metavar="N",
        help="N draws of TRACE, every policy on the same ones: --resample with N seeds from "
        "--seed on; of a generator N seeds",
    )  # fmt: skip
    add_pool(parser)
    add_workload(parser)
    add_world(parser)
    parser.add_argument(
        "--jobs", type=arguments.count, default=1, metavar="N",
        help="replays at once, each in a process of its own; default %(default)s",
    )  # fmt: skip
    add_reports(
        parser,
        json="all figures, with hashes",
        html="one page with pictures",
        csv="every request with its decision and the best choice there was; for one --policy and "
        "one --seed",
    )
    parser.set_defaults(command=from_module("simulator.cli.replay", "run"))


def add_sources(parsers: Any) -> None:
    """`warmroute-sim sources`."""
    parser = add_command(
        parsers,
        "sources",
        "",
        "the formats and generators of traces, with what each can be asked",
        "Lists the formats of trace files and the generators, with their keys and defaults.",
    )
    parser.set_defaults(command=from_module("simulator.cli.study", "sources"))


def known() -> str:
    """Policies and profiles by name, for the end of a help text."""
    lines = (
        ("policies", names()),
        ("wrappers", wrapper_names()),
        ("profiles", list(PROFILES)),
    )
    return "".join(
        "\n" + fill(f"{title}: {', '.join(of)}", HELP_COLUMNS, subsequent_indent="  ") + "\n"
        for title, of in lines
    )


def add_source(parser: argparse.ArgumentParser) -> None:
    """The trace."""
    parser.add_argument(
        "trace", metavar="TRACE", help="file, folder or pattern of parts, or gen:NAME?key=value&..."
    )


def add_policies(
    parser: argparse.ArgumentParser, seeds: str, policies: tuple[str, ...] = POLICIES
) -> None:
    """What is compared, and with which draws."""
    parser.add_argument(
        "--policy", action="append", metavar="SPEC",
        help="NAME?key=value&... or package.module:attr, then |WRAPPER?key=value&... for "
        "what goes round it; repeat to compare; "
        f"default: {', '.join(policies)}",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=arguments.whole, action="append", metavar="N",
        help=f"of every draw; repeat for a mean and an interval; default: {seeds}",
    )  # fmt: skip
    parser.add_argument(
        "--resample", action="store_true",
        help="a seed is another draw of a file: as many of its sessions, drawn with replacement, "
        "their starts moved; default: seeds of a file decide ties only",
    )  # fmt: skip


def add_pool(parser: argparse.ArgumentParser, workers: str = str(WORKERS)) -> None:
    """Options that say which workers there are."""
    group = parser.add_argument_group("workers").add_argument
    group(
        "--workers", type=arguments.count, metavar="N",
        help=f"how many that do all of a request; default {workers}, 0 beside those of roles",
    )  # fmt: skip
    group(
        "--prefill-workers", type=arguments.count, metavar="N",
        help="how many that prefill for those that decode (docs/disaggregation.md)",
    )  # fmt: skip
    group(
        "--decode-workers", type=arguments.count, metavar="N",
        help="how many that decode what others prefilled, or all of a request",
    )  # fmt: skip
    group(
        "--profile", metavar="P",
        help="model and GPUs of a worker: a name, or a .json file that `calibrate` wrote; "
        f"default {PROFILE}",
    )  # fmt: skip
    group(
        "--kv-tokens", type=arguments.count, metavar="T",
        help="KV tokens a worker holds, as 300000 or 300k; default: the profile's",
    )  # fmt: skip
    group(
        "--host-kv-tokens", type=arguments.count, metavar="T",
        help="evicted KV tokens a worker keeps in host memory; default: none",
    )  # fmt: skip
    group(
        "--host-load-gbps", type=arguments.positive, metavar="G",
        help="Gbit/s of each GPU at which they are loaded again; "
        f"default {HOST_LOAD_GBPS:g}",
    )  # fmt: skip
    group(
        "--prefix-wait-tokens", type=arguments.whole, metavar="N",
        help="least prefix for which a request waits while its worker computes it for another; "
        "0: never, as in vLLM and SGLang; default: 256, as in our engine",
    )  # fmt: skip
    group(
        "--group", action="append", metavar="KEY=VALUE,...",
        help="workers that are alike, instead of the options above; repeat for a mixed pool. "
        "Keys: count, profile, role (both, prefill, decode), kv_tokens, speed, max_num_tokens, "
        "max_batch_size, max_model_tokens, prefix_wait_tokens, max_requests, max_queued_tokens, "
        "max_kv_fraction, host_kv_tokens, host_load_gbps",
    )  # fmt: skip
    group(
        "--block-size", type=arguments.count, metavar="B",
        help="tokens of a KV block of the workers; default: the trace's, 16 for generators",
    )  # fmt: skip


def add_workload(parser: argparse.ArgumentParser, *, closed_loop: bool = True) -> None:
    """Options that say which requests come, and when."""
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--format", default="auto", metavar="F",
        help=f"of TRACE: {', '.join(one.name for one in FORMATS)}; default: found by looking",
    )  # fmt: skip
    group.add_argument(
        "--block-tokens", type=arguments.count, metavar="N",
        help="prompt tokens that an id of TRACE stands for; default: as the format says",
    )  # fmt: skip
    pace = group.add_mutually_exclusive_group()
    pace.add_argument(
        "--speed", type=arguments.positive, metavar="X",
        help="arrivals X times as fast as recorded; default 1",
    )  # fmt: skip
    pace.add_argument(
        "--rate", type=arguments.positive, metavar="R",
        help="scale all times so that R requests come per second on average",
    )  # fmt: skip
    group.add_argument("--requests", type=arguments.count, metavar="N", help="the first N only")
    group.add_argument(
        "--skip", type=arguments.not_negative, default=0.0, metavar="S",
        help="leave out the first S seconds of a file, as recorded; --seconds counts from there",
    )  # fmt: skip
    group.add_argument(
        "--seconds", type=arguments.positive, metavar="S",
        help="the first S seconds only, as recorded",
    )  # fmt: skip
    group.add_argument(
        "--spread", type=arguments.positive, metavar="S",
        help="spread requests of one timestamp over S seconds (Mooncake's traces: 3)",
    )  # fmt: skip
    if closed_loop:
        group.add_argument(
            "--closed-loop", action="store_true",
            help="a session's next turn waits for the answer before it, and the pause between; "
            "default: requests come at their times, whatever became of earlier ones",
        )  # fmt: skip
    else:
        parser.set_defaults(closed_loop=False)
    group.add_argument(
        "--strict", action="store_true",
        help="stop at the first wrong line; default: leave it out, count it, say so",
    )  # fmt: skip


def add_world(parser: argparse.ArgumentParser) -> None:
    """Options of the world around, and of what a good answer is."""
    group = parser.add_argument_group("the world around").add_argument
    for name, what in (
        ("network", "one way between router and worker"),
        ("event-lag", "from a step's end to its KV events' arrival"),
        ("report-every", "between two load reports of a worker; 0: none"),
        ("report-lag", "how old a load report is when it arrives"),
        ("replica-lag", "until what one replica does is known to the others"),
    ):
        default = getattr(_WORLD, f"{name.replace('-', '_')}_ms")
        group(
            f"--{name}-ms", type=arguments.not_negative, default=default, metavar="MS",
            help=f"{what}; default {default:g}",
        )  # fmt: skip
    group(
        "--no-host-events", action="store_true",
        help="routers are told of the GPUs' blocks alone, not of those in host memory",
    )  # fmt: skip
    group(
        "--link-gbps", type=arguments.positive, default=_WORLD.link_gbps, metavar="G",
        help="Gbit/s of each GPU for KV between workers of roles; default %(default)g",
    )  # fmt: skip
    group(
        "--link-setup-ms", type=arguments.not_negative, default=_WORLD.link_setup_ms, metavar="MS",
        help="before each transfer; default %(default)g",
    )  # fmt: skip
    group(
        "--disaggregation", choices=get_args(Disaggregation),
        help="auto: two workers where the first token comes sooner; always: wherever there are "
        "two; never; default auto",
    )  # fmt: skip
    group(
        "--disaggregation-tpot-ms", type=arguments.not_negative, default=0.0, metavar="MS",
        help="auto: prefill beside answers only what leaves their time per token below this; "
        "default 0, unknown",
    )  # fmt: skip
    group(
        "--event-loss", type=arguments.share, default=_WORLD.event_loss, metavar="SHARE",
        help=f"of KV event batches that never arrive; default {_WORLD.event_loss:g}",
    )  # fmt: skip
    group(
        "--replicas", type=arguments.count, default=_WORLD.replicas, metavar="N",
        help="routers in front of the pool; each request comes through any of them; default 1",
    )  # fmt: skip
    group(
        "--hold-s", type=arguments.not_negative, metavar="S",
        help="longest wait at the router, then a request is turned away; "
        f"default {CoreSettings().hold_s:g}, as the router's limits.hold_s",
    )  # fmt: skip
    group("--no-sharing", action="store_true", help="these know nothing of each other")
    group("--no-events", action="store_true", help="workers publish no KV events")
    told = "so many workers do not tell how much KV they hold; default none"
    group("--untold-capacities", type=arguments.count, metavar="N", help=told)
    group(
        "--faults", metavar="FILE",
        help="YAML: when which worker dies, hangs, drains, joins ... (docs/simulator.md, Faults)",
    )  # fmt: skip
    _add_goodput(parser)


def _add_goodput(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("a good answer").add_argument
    limits(
        "--good-ttft-ms", type=arguments.positive, default=_GOODPUT.ttft_ms, metavar="MS",
        help=f"first token within; default {_GOODPUT.ttft_ms:g}",
    )  # fmt: skip
    limits(
        "--good-tpot-ms", type=arguments.positive, default=_GOODPUT.tpot_ms, metavar="MS",
        help=f"mean time per later token within; default {_GOODPUT.tpot_ms:g}",
    )  # fmt: skip


def add_reports(parser: argparse.ArgumentParser, **what: str) -> None:
    """Files to write besides what is printed: option -> what is in it."""
    group = parser.add_argument_group("files to write")
    for name, meaning in what.items():
        group.add_argument(f"--{name}", type=Path, metavar="FILE", help=meaning)
