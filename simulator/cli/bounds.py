"""The commands `bound` and `hits`: limits that no policy can beat, and hit rates of
caches alone.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct
from rich.console import Console

from simulator.cli.flags import Group, OneOf, Written, capacity, command
from simulator.cli.plan import look_over
from simulator.cli.setups import (
    WORKERS,
    Draws,
    OpenLoop,
    Seeds,
    SetupOptions,
    TraceAt,
    known,
    setup_of,
    workload_of,
)
from simulator.cli.usage import UsageError, check_files, check_policy, write_json
from simulator.limits.hits import ALL_RULES, RULES
from simulator.limits.hits import hits as hit_rows
from simulator.limits.report import bound as bounded
from simulator.limits.show import bound_tables, hits_table
from simulator.report.board import Board
from simulator.report.console import print_source_notes
from simulator.workloads.open import open_jobs


class Hits(Struct, kw_only=True):
    """The options of `hits`."""

    trace: TraceAt
    workers: Annotated[int, "number of workers"] = WORKERS
    kv_tokens: Annotated[int | None, capacity, "T", "number of tokens that each worker's cache "
        "holds: 300k, 1M, inf"]  # fmt: skip
    rule: Annotated[tuple[str, ...], OneOf(ALL_RULES), "RULE", f"routing rule: "
        f"{', '.join(ALL_RULES)}; repeat "
        f"for several; default: the first {len(RULES)}"] = ()  # fmt: skip
    requests: Annotated[OpenLoop, Group("requests")]
    json: Annotated[Written, "file that gets the rows"] = None


@command(
    "TRACE --kv-tokens T [--workers N] [option]...",
    "example:\n  warmroute-sim hits requests.jsonl --workers 8 --kv-tokens 300k\n",
)
def hits(options: Hits, console: Console) -> bool:
    """Computes hit rates of routing rules for the caches of a pool, in seconds. The command
    takes requests in order and caches a prompt's blocks as soon as the prompt arrives, so results
    have no latencies.
    """
    check_files([options.trace], json=options.json)
    stream = open_jobs(workload_of(options.trace, options.requests))
    try:
        rows = hit_rows(
            stream.jobs,
            block_tokens=stream.block_tokens,
            workers=options.workers,
            kv_tokens=options.kv_tokens,
            rules=options.rule or RULES,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    console.print(hits_table(rows))
    print_source_notes(console, stream)
    write_json(options.json, rows)
    return bool(rows)


class OneDraw(Draws):
    """The policies that are compared on one draw of the workload."""

    seed: Annotated[Seeds, "seed of all random draws; default: 0; only one"
    ] = ()  # fmt: skip


class BoundedSetup(SetupOptions, kw_only=True):
    """A replay in open loop: requests arrive at their recorded times."""

    requests: Annotated[OpenLoop, Group("requests")]


class Bound(Struct, kw_only=True):
    """The options of `bound`."""

    draws: OneDraw
    no_waterfall: Annotated[
        bool, "leave out the table of losses, which takes two thirds of the time"
    ] = False
    setup: BoundedSetup
    json: Annotated[Written, "file that gets all figures"] = None


@command(
    "TRACE [--policy SPEC]... [--workers N] [--profile P] [option]...",
    "example:\n  warmroute-sim bound requests.jsonl --policy hybrid\n" + known(),
)
def bound(options: Bound, console: Console) -> bool:
    """Computes lower bounds of latency and upper bounds of hits for TRACE on a pool, and for each
    policy the distance to these bounds (gap), the regret and the losses.
    """
    check_files([options.setup.trace, options.setup.around.faults], json=options.json)
    policies = options.draws.policies()
    for policy in policies:
        check_policy(policy)
    seeds = options.draws.seed or (0,)
    if len(seeds) > 1:
        raise UsageError("--seed: bounds are for one seed; run it once for each")
    setup = setup_of(options.setup, policies[0], seeds[0], resample=options.draws.resample)
    look_over(console, setup.workload)
    with Board(console) as board:
        report = bounded(
            setup, policies, waterfall=not options.no_waterfall, on_progress=board.count
        )
    console.print(bound_tables(report))
    write_json(options.json, report)
    return True
