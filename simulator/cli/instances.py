"""The command `instances`: the number of instances of a batching model that a load needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from msgspec import Struct
from rich.console import Console

from simulator.capacity.batches import (
    BEYOND,
    MAX_BATCH,
    Batches,
    MeasurementError,
    fit,
    given,
    read_measured,
)
from simulator.capacity.instances import (
    HEADROOM,
    MAX_INSTANCES,
    MAX_VARIABILITY,
    MOST_INSTANCES,
    ArrivingLoad,
    InstancePlan,
    Memory,
    Planner,
    Row,
    ServiceTarget,
    load_of,
)
from simulator.cli.flags import (
    Group,
    NotNegative,
    Place,
    Share,
    Written,
    at_most,
    command,
)
from simulator.cli.usage import UsageError, check_files, write_json
from simulator.report.console import print_source_notes
from simulator.report.page import Page, Picture, Section, Table
from simulator.report.plots import line_plot
from simulator.traces.spec import WorkloadSpec
from simulator.workloads.open import open_jobs

GIVEN_BATCH = 8  # the largest batch of a line that was given
HEAD = (
    "instances", "batch", "busy", "waiting", "wait, ms", "mean, ms", "p50, ms", "p99, ms", "load",
)  # fmt: skip
LEGEND = (
    ("batch", "requests of an execution, mean"),
    ("busy", "share of its time that an instance executes; batching by itself keeps it high"),
    ("waiting", "requests in the queue, mean"),
    ("load", "of what full batches take; from 100 % on the queue grows without end"),
)


EXAMPLES = """\
example with measured times:
  warmroute doctor http://gpu1:8000 --probe --measure resnet.json
  warmroute-sim instances resnet.json --rate 400 --p99-ms 80
  warmroute-sim instances resnet.json --log requests.jsonl --p99-ms 80 --device-gib 16 \\
      --instance-gib 4 --request-mib 100
example without a measurement, for a model that takes 10 ms + 2 ms for each request of a batch:
  warmroute-sim instances --base-s 0.010 --per-request-s 0.002 --max-batch 8 --rate 400 --p99-ms 80

what an answer means:
  An execution of b requests takes a + c x b seconds. One instance serves at most 1/c requests per
  second, with the largest batches; more instances serve more only while the device is idle
  between executions. Busy instances batch by themselves: requests that arrive during an execution
  form the next batch. So first let batches grow to the knee, then add instances. Then measure
  again with that many instances and give several FILEs, because instances on one device slow each
  other. A high "busy" is no problem while batches are not full; "load" shows how full they are.

exit status: 1 if no allowed number of instances keeps the target
"""


class Times(Struct):
    """The times of executions, if nothing was measured."""

    base_s: Annotated[
        NotNegative | None, "A", "seconds that every execution takes at any batch size"
    ] = None
    per_request_s: Annotated[NotNegative | None, "C", "seconds that each request of a batch adds "
        "to an execution"
    ] = None  # fmt: skip
    max_batch: Annotated[int | None, at_most(MAX_BATCH), "B", "largest batch; default: as FILE "
        "says, else 8; at most twice the largest measured batch"] = None  # fmt: skip


class LoadOptions(Struct):
    """The load on the instances: the requests that arrive."""

    rate: Annotated[float | None, "R", "number of requests per second at the peak"] = None
    log: Annotated[str | None, "LOG", "a request log of the router (--request-log), or another "
        "trace: the 99th percentile of its minutes is the peak"] = None  # fmt: skip
    variability: Annotated[NotNegative | None, "V", "variance / mean^2 of the time between "
        "arrivals: 0 even, 1 Poisson, more for bursts; default: as the log's, else 1"
    ] = None  # fmt: skip


class TargetOptions(Struct):
    """The latency targets, and the reserve that stays free."""

    mean_ms: Annotated[float | None, "longest mean time from arrival to answer"] = None
    p50_ms: Annotated[float | None, "longest median time from arrival to answer"] = None
    p99_ms: Annotated[float | None, "longest 99th percentile of the time from arrival to answer"
    ] = None  # fmt: skip
    headroom: Annotated[Share, "SHARE", "share of time (the target holds at rate / (1 - SHARE)) "
        "and of memory that stays free"] = HEADROOM  # fmt: skip
    most_instances: Annotated[int, at_most(MAX_INSTANCES), "largest number of instances to try"] = (
        MOST_INSTANCES
    )


class MemoryOptions(Struct):
    """The memory of a device and of an instance."""

    device_gib: Annotated[float | None, "memory of a device, GiB"] = None
    instance_gib: Annotated[float | None, "memory of an instance before the first request "
        "(weights and runtime), GiB"] = None  # fmt: skip
    request_mib: Annotated[NotNegative, "M", "memory that each request of a full batch adds, MiB; "
        "default 0"] = 0.0  # fmt: skip
    devices: Annotated[int, "number of devices"] = 1


class Instances(Struct, kw_only=True):
    """The options of `instances`."""

    measured: Annotated[tuple[Path, ...], Place("*"), "times of batches by size, written by "
        "`warmroute "
        "doctor URL --probe --measure FILE`; several files if one model was measured beside "
        "different numbers of instances"]  # fmt: skip
    times: Annotated[Times, Group("times of executions, in place of FILE")]
    load: Annotated[LoadOptions, Group("load")]
    target: Annotated[TargetOptions, Group("target")]
    memory: Annotated[MemoryOptions, Group("memory, which limits the number of instances")]
    json: Annotated[Written, "file that gets the plan with all figures"] = None
    html: Annotated[Written, "page with the plan; its pictures need matplotlib"] = None


@command(
    "[FILE]... (--rate R | --log LOG) [--p99-ms MS] [--device-gib G --instance-gib G]...", EXAMPLES
)
def instances(options: Instances, console: Console) -> bool:
    """Simulates instances of a model behind one queue, with measured times of batches. Adds
    instances until the target is kept with a reserve. Prints mean batch, utilisation, queue and
    latency for each number of instances, the least number that is enough (also if one instance
    fails), the knee of an instance, and the queue delay worth setting.
    """
    check_files([*options.measured, options.load.log], json=options.json, html=options.html)
    measured = _measured(options)
    load = _load(options.load, console)
    asked = options.target
    mean_s, p50_s, p99_s = map(_seconds, (asked.mean_ms, asked.p50_ms, asked.p99_ms))
    target = ServiceTarget(mean_s, p50_s, p99_s, asked.headroom)
    planner = Planner(measured, load, target, _most(options, measured))
    plan = planner.plan()
    lines = [*_given_lines(measured, load, target), *_answer(planner, plan)]
    table = _table(plan.rows, plan.needed)
    for line in lines[: len(measured) + 1]:
        console.print(line, highlight=False, soft_wrap=True)
    for part in table.in_terminal(console.width):
        console.print(part)
    for line in lines[len(measured) + 1 :]:
        console.print(line, highlight=False, soft_wrap=True)
    for word, meaning in LEGEND:
        console.print(f"{word:<9} {meaning}", style="dim", highlight=False)
    found = {"load": load, "target": target, "models": _model_rows(measured), "plan": plan}
    write_json(options.json, found)
    if options.html is not None:
        options.html.write_text(_page(planner, plan, lines))
    return plan.needed is not None


# --- what was asked for -------------------------------------------------------------------------


def _measured(options: Instances) -> list[Batches]:
    times = options.times
    base_s, each_s = times.base_s, times.per_request_s
    if options.measured and (base_s, each_s) != (None, None):
        raise UsageError("give measured FILEs or --base-s and --per-request-s, not both")
    try:
        if not options.measured:
            if base_s is None or each_s is None:
                raise UsageError(
                    "say how long batches take: FILE of `warmroute doctor URL --probe --measure "
                    "FILE`, or --base-s and --per-request-s"
                )
            return [given(base_s, each_s, times.max_batch or GIVEN_BATCH)]
        found = [fit(read_measured(path), times.max_batch) for path in options.measured]
    except MeasurementError as error:
        raise UsageError(str(error)) from error
    names = {one.model for one in found}
    if len(names) > 1:
        raise UsageError(f"FILEs of one model, please: these are of {', '.join(sorted(names))}")
    beside = [one.instances for one in found]
    if len(set(beside)) < len(beside):
        raise UsageError(
            "each FILE must have been measured beside another number of instances; these say "
            f"{', '.join(map(str, beside))}"
        )
    return found


def _load(options: LoadOptions, console: Console) -> ArrivingLoad:
    if (options.variability or 0.0) > MAX_VARIABILITY:
        raise UsageError(f"--variability {options.variability:g}: {MAX_VARIABILITY:g} at most")
    if options.log is None:
        if options.rate is None:
            raise UsageError("say how much comes: --rate R, or --log FILE of the router's requests")
        return ArrivingLoad(
            options.rate, 1.0 if options.variability is None else options.variability
        )
    stream = open_jobs(WorkloadSpec(source=options.log))
    try:
        load = load_of(stream.jobs)
    except ValueError as error:
        raise UsageError(f"--log {options.log}: {error}") from error
    print_source_notes(console, stream)
    spread = load.variability if options.variability is None else options.variability
    return ArrivingLoad(options.rate or load.rate_per_s, spread)


def _seconds(ms: float | None) -> float:
    return math.inf if ms is None else ms / 1e3


def _most(options: Instances, measured: Sequence[Batches]) -> int:
    """Return the largest number of instances to plan with, which is as many as the memory holds if
    the memory is known.
    """
    most, headroom, given = options.target.most_instances, options.target.headroom, options.memory
    if given.device_gib is None and given.instance_gib is None:
        return most
    if given.device_gib is None or given.instance_gib is None:
        raise UsageError("memory needs both: --device-gib and --instance-gib")
    memory = Memory(given.device_gib, given.instance_gib, given.request_mib / 1024, given.devices)
    largest = max(one.largest for one in measured)
    held = memory.most(largest, headroom)
    if not held:
        each = memory.instance + largest * memory.request
        raise UsageError(
            f"memory: an instance with a batch of {largest} takes {each:.3g} GiB, and of a device "
            f"of {memory.device:g} GiB {memory.device * (1 - headroom):.3g} are planned; "
            "take a larger device, a smaller --max-batch, or less --headroom"
        )
    return min(most, held)


# --- what is told -------------------------------------------------------------------------------


def _given_lines(
    measured: Sequence[Batches], load: ArrivingLoad, target: ServiceTarget
) -> Iterator[str]:
    """Yield a line for each measurement, then one for the load."""
    for one in measured:
        told = (
            f"{one.model}: a batch of b takes {_ms(one.base_s)} + {_ms(one.per_request_s)} x b ms"
        )
        if (error_s := one.error_s(one.largest)) is not None:
            told += f", ± {_ms(error_s)} ms at {one.largest} (95 %), worst size off by "
            told += f"{one.residual:.1%}"
        if one.sizes:
            told += f"; seen: {', '.join(str(size.batch) for size in one.sizes)}"
            told += f", beside {one.instances}"
        yield f"{told}; full batches of {one.largest}: {one.most_per_s:,.4g} requests/s each"
    bounds = [
        f"{name} {_ms(bound)} ms"
        for name in ("mean", "p50", "p99")
        if math.isfinite(bound := getattr(target, f"{name}_s"))
    ]
    asked = " and ".join(bounds) or "no latency bound"
    yield (
        f"load: {load.rate_per_s:,.4g} requests/s, variability {load.variability:.2g}; target: "
        f"{asked}, with {target.headroom:.0%} of time and memory in reserve"
    )


def _table(rows: Sequence[Row], needed: int | None) -> Table:
    def cell(value: float) -> str:
        return "∞" if math.isinf(value) else f"{value * 1e3:,.4g}"

    cells = [
        (
            str(one.instances), f"{one.batch:.2f}", f"{one.utilisation:.0%}",
            "∞" if math.isinf(one.queue) else f"{one.queue:,.3g}",
            *map(cell, (one.wait_s, one.mean_s, one.p50_s, one.p99_s)),
            f"{one.capacity_share:.0%}",
        )
        for one in rows
    ]  # fmt: skip
    strong = frozenset(n for n, one in enumerate(rows) if one.instances == needed)
    return Table(HEAD, cells, strong=strong)


def _answer(planner: Planner, plan: InstancePlan) -> Iterator[str]:
    """Yield the recommendation, then its reasons."""
    load, target = planner.load, planner.target
    reserved = load.rate_per_s / (1.0 - target.headroom)
    if plan.needed is None:
        yield from _no(planner, plan, reserved)
    else:
        assert plan.reserve is not None
        name, _ = target.tightest
        yield (
            f"Take {plan.needed}: {name} {_ms(getattr(plan.reserve, f'{name}_s'))} ms at "
            f"{reserved:,.4g} requests/s, which leaves the reserve."
        )
        if plan.miss is not None:
            yield f"With {plan.needed - 1}: {plan.miss} there."
        if plan.with_failure is not None:
            yield f"Take {plan.with_failure} where one may fail: the others keep the target."
        else:
            yield f"One may not fail: {plan.most} at most are allowed. Add a device or a server."
        fast, slow = plan.within_error
        if (fast, slow) != (plan.needed, plan.needed):
            shown = " to ".join(str(one or f"more than {plan.most}") for one in (fast, slow))
            yield f"Within the error of the measured times: {shown}. Measure longer to know."
    yield (
        f"Knee of an instance: {plan.knee.requests} requests in flight ({plan.knee.rule}). "
        f"Decoupled, let {plan.threads} at most run in it at a time, and give it as many threads."
    )
    if plan.delayed is None:
        yield (
            "Queue delay: 0. Instances that are busy batch by themselves; a delay would save no "
            "latency here."
        )
    else:
        name, _ = target.tightest
        yield (
            f"Queue delay: max_queue_delay_microseconds {plan.delay_s * 1e6:.0f} makes batches of "
            f"{plan.delayed.batch:.2f} and {name} {_ms(getattr(plan.delayed, f'{name}_s'))} ms."
        )
    for note in plan.notes:
        yield f"Note: {note}."


def _no(planner: Planner, plan: InstancePlan, reserved: float) -> Iterator[str]:
    """Yield the reason why no number of instances is enough, and what would make one enough."""
    batches = planner.batches(plan.most)
    name, bound_s = planner.target.tightest
    if batches.seconds[1] > bound_s:
        yield (
            f"No number keeps the target: a request alone takes {_ms(batches.seconds[1])} ms, and "
            f"{name} {_ms(bound_s)} ms was asked for. Raise the bound, or make the model faster."
        )
        return
    most_per_s = plan.most * batches.most_per_s
    if reserved >= most_per_s:
        at_least = math.floor(reserved / batches.most_per_s) + 1
        yield (
            f"{plan.most} instances are too few: full batches take {most_per_s:,.4g} requests/s, "
            f"and {reserved:,.4g} are to be planned. {at_least} at least would do: give more "
            "--devices or a larger --most-instances, or ask for less."
        )
        return
    row = planner.row_reserved(plan.most)
    yield (
        f"Up to {plan.most} instances miss the target ({planner.target.misses(row)} at "
        f"{reserved:,.4g} requests/s). Raise the bound, make batches smaller (--max-batch), or "
        "give more --devices or --most-instances."
    )


def _model_rows(measured: Sequence[Batches]) -> list[dict[str, Any]]:
    return [
        {
            "model": one.model, "instances": one.instances, "base_s": one.base_s,
            "per_request_s": one.per_request_s, "largest_batch": one.largest,
            "worst_residual": one.residual, "error_s": one.error_s(one.largest),
            "seconds": one.seconds[1:],
        }
        for one in measured
    ]  # fmt: skip


def _page(planner: Planner, plan: InstancePlan, lines: Sequence[str]) -> str:
    """Return the plan as a self-contained HTML page."""
    rows = [one for one in plan.rows if not one.overloaded]
    counts = [float(one.instances) for one in rows]
    _, bound_s = planner.target.tightest
    limit = bound_s * 1e3 if math.isfinite(bound_s) else None
    latency = {
        name: (counts, [getattr(one, f"{name}_s") * 1e3 for one in rows]) for name in ("p50", "p99")
    }
    use = {"batch, mean": (counts, [one.batch for one in rows])}
    busy = {"busy, %": (counts, [100 * one.utilisation for one in rows])}
    batches = planner.batches(plan.needed or 1)
    sizes = [float(b) for b in range(1, batches.largest + 1)]
    times = {"fit": (sizes, [one * 1e3 for one in batches.seconds[1:]])}
    low, high = ([one * 1e3 for one in batches.within(sign)[1:]] for sign in (-1, 1))
    bands = {"fit": (low, high)}
    if batches.sizes:
        seen = [one for one in batches.sizes if one.batch <= batches.largest]
        times["measured"] = ([float(s.batch) for s in seen], [s.seconds * 1e3 for s in seen])
        bands["measured"] = (times["measured"][1], times["measured"][1])
    drawn = f"Drawn to {BEYOND} times the largest seen." if batches.sizes else "As given."
    rate = {"one instance": (sizes, [batches.rate_per_s(int(b)) for b in sizes])}
    plot = partial(line_plot, whole_x=True)
    by_count = [
        Picture(plot(latency, "instances", "latency, ms", points=True, limit=limit),
                "latency by number of instances", "The line across is the bound."),
        Picture(plot(use, "instances", "requests a batch", points=True),
                "mean batch by number of instances", "More instances, smaller batches."),
        Picture(plot(busy, "instances", "busy, %", points=True, ylim=(0, 105)),
                "utilisation by number of instances"),
    ]  # fmt: skip
    by_batch = [
        Picture(plot(times, "batch", "execution, ms", bands=bands, ylim=(0, None)),
                "time of an execution by batch", drawn),
        Picture(plot(rate, "requests in flight", "requests/s", points=True, ylim=(0, None)),
                "throughput by requests in flight", f"Knee: {plan.knee.requests}."),
    ]  # fmt: skip
    head = len(planner.measured) + 1
    sections = [
        Section("By number of instances", "At the load, without the reserve.",
                tables=[_table(plan.rows, plan.needed)], pictures=by_count, terms=LEGEND),
        Section("What it rests on", pictures=by_batch, lines=lines[:head]),
    ]  # fmt: skip
    notes = [
        "Simulated: one queue, first come first served; who is free takes what is there, up to the "
        "largest batch. Executions take the fitted times; arrivals are drawn from a seed."
    ]
    title = f"How many instances: {batches.model}"
    return Page(title, lines[head:], (), sections, notes).html()


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.4g}"
