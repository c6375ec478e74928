"""Options that several commands share: the replayed workload and pool, and the `Setup` made of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Annotated
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Struct, UnsetType

from engine.profiles import PROFILES
from policies.facts import Role
from policies.load import names, wrapper_names
from router.core.contract.settings import CoreSettings, DisaggregationMode
from simulator.cli.flags import (
    HELP_COLUMNS,
    Either,
    Group,
    NotNegative,
    Place,
    Share,
    Whole,
)
from simulator.cli.usage import UsageError, check_policy, check_profile
from simulator.replay.setup import (
    HOST_LOAD_GBPS,
    ClientIds,
    Goodput,
    RouterSettings,
    Setup,
    WorkerGroup,
    World,
)
from simulator.traces.formats import FORMATS
from simulator.traces.generators.table import kv_block
from simulator.traces.spec import WorkloadSpec

# By turns, by load alone, by load and caches, and what a router does that nobody told otherwise.
# `kv_prefix` alone would be a warning, not a choice.
POLICIES = ("round_robin", "least_requests", "hybrid", "warmset")
PROFILE = "qwen3-32b-h100-tp2"
WORKERS = 8
MAX_DRAWS = 10_000
SEEDS = (1, 2, 3)  # default of commands that need several seeds
GENERATED = "gen:"
TraceAt = Annotated[
    str, Place(), "TRACE", "file, folder or pattern of parts, or gen:NAME?key=value&..."
]
KvTokens = Annotated[
    int | None,
    "T",
    "number of KV tokens that a worker holds, as 300000 or 300k; default: as in the profile",
]
Policies = Annotated[
    tuple[str, ...], "SPEC", "NAME?key=value&... or package.module:attr, then "
    "|WRAPPER?key=value&... for a wrapper around the policy; repeat to compare; "
    f"default: {', '.join(POLICIES)}",
]  # fmt: skip
Seeds = tuple[Whole, ...]
_SEED = "seed of all random draws; repeat for a mean and an interval; default:"


class Draws(Struct):
    """The policies to compare, and the seeds to compare them on."""

    policy: Policies = ()
    seed: Annotated[Seeds, f"{_SEED} 0"] = ()
    resample: Annotated[bool, "draw the sessions of a file anew for each seed, with replacement "
        "and moved starts; default: the seed only breaks ties"
    ] = False  # fmt: skip

    def policies(self) -> tuple[str, ...]:
        """Return the policies, each once."""
        return tuple(dict.fromkeys(self.policy or POLICIES))


class SeveralDraws(Draws):
    """The policies and seeds of commands that need several seeds."""

    seed: Annotated[Seeds, f"{_SEED} {' '.join(map(str, SEEDS))}"] = ()


class Pool(Struct):
    """The workers of the pool."""

    workers: Annotated[int | None, f"workers that prefill and decode; default {WORKERS}, 0 "
        "beside workers with roles"] = None  # fmt: skip
    prefill_workers: Annotated[
        int | None, "number of workers that only prefill (docs/disaggregation.md)"
    ] = None
    decode_workers: Annotated[int | None, "number of workers that decode, and prefill if no "
        "prefill worker does"] = None  # fmt: skip
    profile: Annotated[str | None, "P", "model and GPUs of a worker: a name, or a .json file that "
        f"`calibrate` wrote; default {PROFILE}"] = None  # fmt: skip
    kv_tokens: KvTokens = None
    host_kv_tokens: Annotated[int | UnsetType, "T", "number of evicted KV tokens that a worker "
        "keeps in host memory; default: none"] = UNSET  # fmt: skip
    host_load_gbps: Annotated[float | UnsetType, "Gbit/s at which each GPU loads KV from host "
        f"memory; default {HOST_LOAD_GBPS:g}"] = UNSET  # fmt: skip
    cache_groups: Annotated[str | UnsetType, "G", "windows and states that the model caches "
        "besides full attention, as window:1024*6+state*48; default: none"] = UNSET  # fmt: skip
    prefix_wait_tokens: Annotated[Whole | None, "smallest prefix for which a request waits while "
        "the worker computes this prefix for another request; 0: never, as in vLLM and SGLang; "
        "default: 256, as in our engine"] = None  # fmt: skip
    group: Annotated[tuple[str, ...], "KEY=VALUE,...", "workers that are alike, instead of the "
        "options above; repeat for a mixed pool. Keys: count, profile, role (both, prefill, "
        "decode), kv_tokens, speed, max_num_tokens, max_batch_size, max_model_tokens, "
        "prefix_wait_tokens, max_requests, max_queued_tokens, max_kv_fraction, host_kv_tokens, "
        "host_load_gbps, cache_groups"] = ()  # fmt: skip
    block_size: Annotated[int | None, "B", "number of tokens of a KV block of the workers; "
        "default: as in the trace, 16 for generators, 64 for gen:coding_agents"] = None  # fmt: skip


class Requests(Struct):
    """The part of the workload to replay, and its timing."""

    format: Annotated[str, "F", f"format of TRACE: {', '.join(one.name for one in FORMATS)}; "
        "default: "
        "found by looking"] = "auto"  # fmt: skip
    tokenizer: Annotated[str | None, "FOLDER", "folder of a tokenizer, for a TRACE that holds "
        "text; "
        "default: four bytes are a token"] = None  # fmt: skip
    block_tokens: Annotated[int | None, "number of prompt tokens that one hash id of TRACE stands "
        "for; default: as in the format"] = None  # fmt: skip
    speed: Annotated[float | None, Either("pace"), "X", "let requests arrive X times as fast as "
        "recorded; default 1"] = None  # fmt: skip
    rate: Annotated[float | None, Either("pace"), "R", "scale all times so that R requests come "
        "per second on average"] = None  # fmt: skip
    requests: Annotated[int | None, "use only the first N requests of TRACE"] = None
    skip: Annotated[NotNegative, "S", "leave out the first S recorded seconds of a file; "
        "--seconds counts after this part"] = 0.0  # fmt: skip
    seconds: Annotated[float | None, "use only the first S recorded seconds of TRACE"] = None
    spread: Annotated[float | None, "S", "spread requests of one timestamp over S seconds "
        "(Mooncake's traces: 3)"] = None  # fmt: skip
    closed_loop: Annotated[bool, "a session's next turn waits for the last answer and a pause; "
        "default: requests come at their recorded times, with or without earlier answers"
    ] = False  # fmt: skip
    strict: Annotated[bool, "stop at the first wrong line; default: leave wrong lines out and "
        "count them"
    ] = False  # fmt: skip


class OpenLoop(Requests):
    """Requests in open loop: they arrive at their times, whether or not earlier ones were
    answered.
    """

    closed_loop: bool = False


class GoodAnswer(Struct):
    """The limits within which an answer counts as good."""

    good_ttft_ms: Annotated[float, "longest time to the first token of a good answer"] = (
        Goodput().ttft_ms
    )
    good_tpot_ms: Annotated[float, "longest mean time per later token of a good answer"] = (
        Goodput().tpot_ms
    )


_WORLD = World()


class Around(Struct):
    """The surroundings of the workers: the network, faults and router replicas."""

    network_ms: Annotated[NotNegative, "network time from router to worker, one way"] = (
        _WORLD.network_ms
    )
    event_lag_ms: Annotated[NotNegative, "time from the end of a step to the arrival of its KV "
        "events"
    ] = _WORLD.event_lag_ms  # fmt: skip
    report_every_ms: Annotated[NotNegative, "time between two load reports of a worker; 0: no "
        "reports"
    ] = _WORLD.report_every_ms  # fmt: skip
    report_lag_ms: Annotated[NotNegative, "age of a load report when it arrives; default 0"
    ] = _WORLD.report_lag_ms  # fmt: skip
    replica_lag_ms: Annotated[NotNegative, "time until other replicas know of a decision of one "
        "replica"
    ] = _WORLD.replica_lag_ms  # fmt: skip
    no_host_events: Annotated[bool, "whether workers publish KV events of GPU memory only, not of "
        "host memory"] = False  # fmt: skip
    link_gbps: Annotated[float, "Gbit/s at which each GPU moves KV between prefill and decode"
    ] = _WORLD.link_gbps  # fmt: skip
    link_setup_ms: Annotated[NotNegative, "time to set up each KV transfer"] = _WORLD.link_setup_ms
    disaggregation: Annotated[DisaggregationMode | None, "when two workers share a request; auto: "
        "where the first token comes sooner; always: wherever possible; never: one worker "
        "computes all; default auto"
    ] = None  # fmt: skip
    disaggregation_tpot_ms: Annotated[NotNegative, "time per token that running answers must keep "
        "while a worker also prefills (auto); default 0, no limit"] = 0.0  # fmt: skip
    event_loss: Annotated[Share, "SHARE", "share of KV event batches that are lost; default 0"
    ] = _WORLD.event_loss  # fmt: skip
    replicas: Annotated[int, "number of router replicas; each request comes through a random "
        "replica"
    ] = _WORLD.replicas  # fmt: skip
    hold_s: Annotated[NotNegative | None, "longest wait of a request at the router; then the "
        f"router rejects it; default {CoreSettings().hold_s:g}, as the router's limits.hold_s"
    ] = None  # fmt: skip
    no_sharing: Annotated[bool, "whether router replicas share nothing"] = False
    no_events: Annotated[bool, "whether workers publish no KV events"] = False
    untold_capacities: Annotated[int | UnsetType, "number of workers that do not report their KV "
        "capacity; default none"] = UNSET  # fmt: skip
    client_ids: Annotated[ClientIds | UnsetType, "ids that clients send; agents: session, parent "
        "and group, as coding agents send; key: one prompt_cache_key for a whole group; none: "
        "no ids; default agents"] = UNSET  # fmt: skip
    faults: Annotated[str | None, "FILE", "YAML file of faults: when which worker dies, hangs, "
        "drains or joins (docs/simulator.md, Faults)"] = None  # fmt: skip


class SetupOptions(Struct, kw_only=True):
    """All options of a replay except policy and seed."""

    trace: TraceAt
    pool: Annotated[Pool, Group("workers")]
    requests: Annotated[Requests, Group("requests")]
    around: Annotated[Around, Group("network, events and replicas")]
    good: Annotated[GoodAnswer, Group("limits of a good answer")]


def setup_of(options: SetupOptions, policy: str, seed: int, *, resample: bool = False) -> Setup:
    """Return the set-up of one policy and seed; raises `UsageError`."""
    check_policy(policy)
    around, good, block_size = options.around, options.good, options.pool.block_size
    if around.no_events and around.event_loss:
        raise UsageError("--event-loss is of KV events, and with --no-events there are none")
    if block_size is None and options.trace.startswith(GENERATED):
        # Generators count in the largest blocks that end where prefixes do, which may be tiny.
        block_size = kv_block(options.trace)
    asked = msgspec.structs.asdict(around)
    world = World(
        **{name: asked[name] for name in World.__struct_fields__ if name in asked},
        events=not around.no_events,
        replicas_share=not around.no_sharing,
        host_events=False if around.no_host_events else UNSET,
    )
    return Setup(
        workload=workload_of(options.trace, options.requests, resample=resample),
        policy=policy,
        groups=groups_of(options.pool),
        block_size=block_size,
        seed=seed,
        closed_loop=options.requests.closed_loop,
        world=world,
        faults=around.faults,
        goodput=Goodput(good.good_ttft_ms, good.good_tpot_ms),
        router=RouterSettings(
            hold_s=around.hold_s,
            disaggregation=around.disaggregation,
            tpot_s=around.disaggregation_tpot_ms / 1e3,
        ),
    )


def workload_of(trace: str, asked: Requests, *, resample: bool = False) -> WorkloadSpec:
    """Return the part of `trace` that the options ask for."""
    format = asked.format
    if asked.tokenizer is not None:
        format += f"{'&' if '?' in format else '?'}tokenizer={quote(asked.tokenizer)}"
    return WorkloadSpec(
        source=trace,
        format=format,
        block_tokens=asked.block_tokens,
        speed=asked.speed or 1.0,
        rate_per_s=asked.rate,
        requests=asked.requests,
        skip_s=asked.skip,
        seconds=asked.seconds,
        spread_s=asked.spread or 0.0,
        strict=asked.strict,
        resample=resample or UNSET,
    )


def groups_of(pool: Pool) -> tuple[WorkerGroup, ...]:
    """Return the groups of workers.

    Raises `UsageError` for a --group with unknown, missing or contradictory keys.
    """
    if not pool.group:
        if pool.profile is not None:
            check_profile(pool.profile)
        roles: dict[Role, int | None] = {
            "both": pool.workers,
            "prefill": pool.prefill_workers,
            "decode": pool.decode_workers,
        }
        if not any(roles.values()):
            roles["both"] = WORKERS
        return tuple(
            WorkerGroup(
                count,
                pool.profile or PROFILE,
                pool.kv_tokens,
                prefix_wait_tokens=pool.prefix_wait_tokens,
                role=role,
                host_kv_tokens=pool.host_kv_tokens,
                host_load_gbps=pool.host_load_gbps,
                cache_groups=pool.cache_groups,
            )
            for role, count in roles.items()
            if count
        )
    for name in Pool.__struct_fields__:
        if name not in ("group", "block_size") and getattr(pool, name) not in (None, UNSET):
            raise UsageError(f"--{name.replace('_', '-')} belongs into --group where there is one")
    return tuple(_group(text) for text in pool.group)


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
    """Return the pairs with values such as 300k and 2M written as plain numbers."""
    factors: Sequence[tuple[str, str]] = (("k", "000"), ("M", "000000"))
    found = dict(pairs)
    for key, value in pairs.items():
        for suffix, zeros in factors:
            if value[:-1].isdigit() and value.endswith(suffix):
                found[key] = value[:-1] + zeros
    return found


def known() -> str:
    """Return the names of policies and profiles, for the end of a help text."""
    lines = (
        ("policies", names()),
        ("wrappers", wrapper_names()),
        ("profiles", list(PROFILES)),
    )
    return "".join(
        "\n" + fill(f"{title}: {', '.join(of)}", HELP_COLUMNS, subsequent_indent="  ") + "\n"
        for title, of in lines
    )


class Runs(Struct):
    """The place where many replays run: processes of this machine, or a cluster."""

    jobs: Annotated[int | None, "number of processes; default: one process for each core"] = None
    dask: Annotated[
        str | None,
        "tcp://HOST:PORT",
        "run the replays on this Dask cluster, not in processes of this machine",
    ] = None
