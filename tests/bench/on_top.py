"""Costs of guard, explanations, wrappers and followed sessions, compared with a `hybrid` decision.

    python -m tests.bench.on_top [--rounds N] [--core C]

A decision is as in `tests.bench.decision`: 64 workers, prompts of 32,768 tokens in blocks of 64,
half of which one worker in eight holds; from a request's arrival to its end. The cases take turns,
so that noise on the machine affects all of them. Figures are medians of differences on one pinned
core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator

from policies.contract import FleetView, RequestView
from policies.facts import Arrival, Finish, FirstToken
from policies.load import load
from policies.pick import pick
from router.core.placement.guard import Verdict
from tests.bench.decision import PROMPTS, TOKENS, prompts, warm_core

WORKERS, BLOCK = 64, 64
DECISIONS = 60  # of one case in one round
Decide = Callable[[int], object]


def case(spec: str, explained: bool = False, guarded: bool = True) -> Decide:
    """Return a function that makes the decision with a given number, on a core with this policy and
    these wrappers.
    """
    asked = prompts(BLOCK)
    core = warm_core(WORKERS, BLOCK, asked)
    policy = load(spec)
    core.set_policy(policy)
    if explained:
        core.chooser.explains_all = True

    def unguarded(request: RequestView, fleet: FleetView) -> Verdict:
        costs = policy.costs(request, fleet, None)
        return Verdict(policy, costs, pick(costs, request.draw, policy.temperature))

    if not guarded:
        core.guard.decide = unguarded  # type: ignore[method-assign]

    def decide(number: int) -> None:
        now_s = 1.0 + number * 0.01
        chain = asked[number % PROMPTS][1]
        core.on_arrival(Arrival(now_s, number, "m", TOKENS, {BLOCK: chain}))
        core.on_first_token(FirstToken(now_s + 0.002, number))
        core.on_finish(Finish(now_s + 0.004, number))

    return decide


def round_us(decide: Decide, first: int) -> float:
    """Return the median microseconds of a case's next decisions, from number `first` on."""
    taken = []
    for number in range(first, first + DECISIONS):
        start_s = time.perf_counter()
        decide(number)
        taken.append(time.perf_counter() - start_s)
    return statistics.median(taken) * 1e6


def measure(rounds: int) -> Iterator[tuple[str, float, float]]:
    """Yield each case: its name, its microseconds, and how many more than those of unguarded
    `hybrid`.
    """
    cases = {
        "hybrid, no guard": case("hybrid", guarded=False),
        "hybrid": case("hybrid"),
        "each decision explained": case("hybrid", explained=True),
        "hybrid|bounded_load": case("hybrid|bounded_load"),
        "warmset: sessions followed": case("warmset"),
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, decide in cases.items():
            taken[name].append(round_us(decide, number * DECISIONS))
    plain = taken["hybrid, no guard"][1:]
    for name, figures in taken.items():
        beyond = [a - b for a, b in zip(figures[1:], plain, strict=True)]
        yield name, statistics.median(figures[1:]), statistics.median(beyond)


def main() -> None:
    """Measure all cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--core", type=int, default=0)
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    for name, took_us, beyond_us in measure(options.rounds):
        print(f"{name:28} {took_us:8.1f} us  {beyond_us:+8.1f}")


if __name__ == "__main__":
    main()
