"""Goodput and mean TTFT of conditional disaggregation, of always and of never disaggregating.

    python -m tests.bench.conditional [--workers 8] [--requests 400] [--resamples 3]
        [--others 2 --others 4] [--chunk 2048] [--profile P]

Five workloads run at five loads, given as shares of the computed capacity. Each load is replayed on
several resamples of the workload (sessions drawn with replacement, their starts jittered), the same
ones for every rule, so that differences are paired. Rules: `local`: the decode workers do
everything; `remote`: every request is split into prefill and decode at two workers; `alike`: as
many workers without roles, for comparison; `auto`: the router's own choice, once for each weight of
the requests that decode beside a prefill (`_OTHERS` of `router.core.placement.disaggregation`);
`tpot`: the same with the time per token that clients accept; `2048` and `256`: thresholds of other
routers, the uncached tokens at the decode worker below which it prefills (Dynamo's, with its 0.7 of
the prompt; vLLM's router's).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import msgspec
import numpy as np

from router.core.placement import disaggregation as core
from router.core.placement.choice import Choice
from router.core.placement.pending import Pending
from simulator.capacity.pools import TPOT_MARGIN, TTFT_MARGIN, split
from simulator.capacity.rates import Link, Shape, measure
from simulator.replay.result import Verdict
from simulator.replay.run import replay
from simulator.replay.setup import RouterSettings, Setup, WorkerGroup
from simulator.traces.job import ErrorLog, Job, JobStream
from simulator.traces.spec import WorkloadSpec
from simulator.workloads.open import open_jobs, sessions
from tests.bench.rate_match import BLOCK, WORKLOADS, targets_of

LOADS = (0.3, 0.5, 0.7, 0.85, 1.0)
EQUAL = 0.01  # counts of good requests this close are equal
JITTER = 0.05  # a session's start moves by up to this share of the whole time


@dataclass(frozen=True)
class Figures:
    """The goodput and TTFT of one rule on one workload at one load, with a value for each resample.
    Lifetime: run.
    """

    ttft_s: np.ndarray
    good: np.ndarray


def resampled(jobs: Sequence[Job], seed: int) -> list[Job]:
    """Return sessions drawn with replacement, with moved starts and unchanged gaps between turns.

    Copies of a session share blocks only as far as its first turn shares blocks with other
    sessions.
    """
    random = Random(f"resample {seed}")
    known = sessions(iter(jobs))
    span_ns = max(job.at_ns for job in jobs)
    drawn: list[Job] = []
    taken: dict[int, int] = {}
    for _ in known:
        number = random.randrange(len(known))
        name, turns = known[number]
        copy = taken[number] = taken.get(number, -1) + 1
        moved_ns = round((random.random() - 0.5) * 2 * JITTER * span_ns)
        start_ns = max(0, turns[0].at_ns + moved_ns)
        for job in turns:
            at_ns = start_ns + job.at_ns - turns[0].at_ns
            session = None if name is None else f"{name}/{copy}"
            drawn.append(msgspec.structs.replace(job, at_ns=at_ns, session=session))
    drawn.sort(key=lambda job: job.at_ns)
    return drawn


def paced(jobs: Sequence[Job], rate_per_s: float) -> list[Job]:
    """Return the same jobs with their arrival times scaled to a mean rate of `rate_per_s`."""
    factor = (len(jobs) - 1) / (jobs[-1].at_ns / 1e9) / rate_per_s
    return [msgspec.structs.replace(job, at_ns=round(job.at_ns * factor)) for job in jobs]


Rule = Callable[[core.Disaggregation, Pending, Choice, Choice, float], bool]


def fixed(tokens: int, share: float) -> Rule:
    """Return a rule: do not disaggregate if fewer than `tokens` tokens and `share` of the prompt
    are uncached.
    """

    def alone(
        splits: core.Disaggregation,
        pending: Pending,
        prefill: Choice,
        decode: Choice,
        now_s: float,
    ) -> bool:
        prompt = pending.arrival.prompt_tokens
        uncached = prompt - decode.decision.hit_tokens
        return uncached < tokens and uncached < share * prompt

    return alone


OWN: Rule = core.Disaggregation._alone_is_better
PEERS = {"2048": fixed(2048, 0.7), "256": fixed(256, 2.0)}


def study(
    options: argparse.Namespace,
) -> Iterator[tuple[str, float, dict[str, Figures]]]:
    """Yield (workload, load, figures of each rule) for each workload and load."""
    shape, link, workers = Shape.of(options.profile), Link(), options.workers
    for workload, source in WORKLOADS.items():
        stream = open_jobs(WorkloadSpec(source, requests=options.requests))
        jobs = list(stream.jobs)
        mix = measure(iter(jobs), stream.block_tokens, workers // 2, shape.kv_tokens).mix
        targets = targets_of(shape, mix)
        found = split(mix, shape, shape, targets, link, workers * shape.gpus)
        if found is None:
            continue
        n_p = int(found.workers("prefill"))
        roles = (
            WorkerGroup(n_p, options.profile, role="prefill"),
            WorkerGroup(workers - n_p, options.profile, role="decode"),
        )
        alike = (WorkerGroup(workers, options.profile),)
        samples = [resampled(jobs, seed) for seed in range(options.resamples)]
        for load in LOADS:
            rules = {
                "local": ("never", roles),
                "remote": ("always", roles),
                "alike": ("auto", alike),
            }
            rules |= {f"auto {weight:g}": ("auto", roles) for weight in options.others}
            rules |= dict.fromkeys(("tpot", *PEERS), ("auto", roles))
            figures: dict[str, list[tuple[float, float]]] = {name: [] for name in rules}
            for sample in samples:
                timed = paced(sample, load * found.requests_per_s)
                for name, (mode, groups) in rules.items():
                    rule = PEERS.get(name, OWN)
                    setattr(core.Disaggregation, "_alone_is_better", rule)  # noqa: B010
                    if name.startswith("auto"):
                        core._OTHERS = float(name.split()[1])
                    given = JobStream(
                        workload, stream.block_tokens, iter(timed), len(timed),
                        ErrorLog(workload), workload, lambda: 1.0,
                    )  # fmt: skip
                    setup = Setup(
                        WorkloadSpec(source), "hybrid", groups, block_size=BLOCK,
                        router=RouterSettings(
                            disaggregation=mode,  # type: ignore[arg-type]
                            tpot_s=targets.tpot_s if name == "tpot" else None,
                        ),
                    )  # fmt: skip
                    table = replay(setup, stream=given).table
                    done = table.verdict == Verdict.COMPLETED
                    ttft_s = (table.first_token_ns - table.arrival_ns) / 1e9
                    later = np.maximum(table.output_tokens - 1, 1)
                    tpot_s = (table.finish_ns - table.first_token_ns) / 1e9 / later
                    good = done & (ttft_s <= TTFT_MARGIN * targets.ttft_s)
                    good &= tpot_s <= TPOT_MARGIN * targets.tpot_s
                    figures[name].append((float(ttft_s[done].mean()), float(good.mean())))
            yield (
                f"{workload} ({n_p}+{workers - n_p})",
                load,
                {name: Figures(*np.array(rows).T) for name, rows in figures.items()},
            )


def main() -> None:
    """Print the figures of every case, and how each weight compares with the better of the rules
    `local` and `remote`.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--resamples", type=int, default=3)
    parser.add_argument("--others", type=float, action="append")
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--profile", default="qwen3-32b-h100-tp2")
    options = parser.parse_args()
    options.others = options.others or [core._OTHERS]
    if options.chunk:
        core._CHUNK_TOKENS = options.chunk
    ratios: dict[str, list[tuple[float, float]]] = {}
    for workload, load, found in study(options):
        cells = []
        for name, one in found.items():
            cells.append(f"{name} {1e3 * one.ttft_s.mean():,.0f} ms {one.good.mean():.2f}")
            if name.startswith("auto") or name in ("tpot", *PEERS):
                # Compared with the way that has more good requests, or of equal ones the faster.
                ways = [found["local"], found["remote"]]
                most = max(way.good.mean() for way in ways)
                near = [way for way in ways if way.good.mean() >= most - EQUAL]
                best = min(near, key=lambda way: float(way.ttft_s.mean()))
                pair = (
                    one.ttft_s.mean() / best.ttft_s.mean(),
                    one.good.mean() / max(best.good.mean(), 1e-9),
                )
                ratios.setdefault(name, []).append(pair)
        print(f"{workload} at {load:g}: {'; '.join(cells)}", flush=True)
    for name, pairs in ratios.items():
        ttft, good = np.array(pairs).T
        print(
            f"{name}: TTFT {ttft.mean():.3f} of the better way's, worst {ttft.max():.3f}, best "
            f"{ttft.min():.3f}; good requests {good.mean():.3f}, worst {good.min():.3f}, best "
            f"{good.max():.3f}; worse by over 3 %: {np.sum(ttft > 1.03)} and {np.sum(good < 0.97)} "
            f"of {len(pairs)}"
        )


if __name__ == "__main__":
    main()
