"""Computes how many cores and routers a load needs from the measured figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.bench.sizing.pools import Pool
from tests.bench.sizing.requests import KINDS, Cost, Costs
from tests.bench.sizing.table import Section, two_digits
from tests.bench.sizing.turns import Turns

BUSY = 0.6  # share of a core to plan with: beyond it requests wait for one another
AS_TEXT, IDS = KINDS[0].name, KINDS[3].name


@dataclass(frozen=True, slots=True)
class Demand:
    """A load on a pool of workers, for which cores and routers are computed."""

    what: str
    workers: int
    rate: float  # requests a second
    events: int  # of each streamed answer


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of the other tables, from which the plan is computed."""

    costs: Costs
    pools: Mapping[int, Pool]
    turns: Mapping[int, Turns]


def needs(found: Measured) -> Iterator[tuple[Demand, Cost]]:
    """Yield each load with the CPU time of one of its requests, without the events of its
    answer.
    """
    requests = found.costs.requests
    yield Demand("chats of 500 tokens, no tokenizer", 8, 20, 300), requests[AS_TEXT, "500"]
    yield Demand("chats of 4,000 tokens, no tokenizer", 64, 300, 300), requests[AS_TEXT, "4,000"]
    yield Demand("token ids, 4,000 tokens", 1_000, 2_000, 300), requests[IDS, "4,000"]
    yield Demand("agents, later turns at 30,000 tokens", 16, 20, 300), _turn(found, 30_000)
    yield Demand("agents, later turns at 100,000 tokens", 64, 99, 1_000), _turn(found, 100_000)


def _turn(found: Measured, tokens: int) -> Cost:
    later = found.turns[tokens].later
    return Cost(later.cpu_s, later.loop_s)


def section(found: Measured) -> Section:
    """Return the table of how many cores and routers each load needs."""
    return Section(
        "plan",
        "How many routers",
        "Cores = (idle router + requests a second x (CPU of a request + what the pool's size adds "
        f"+ events x CPU of an event)) / {BUSY:g}. *Routers* is the least number of routers. Take "
        "one more, so that one may fail.",
        ["load", "workers", "requests/s", "events of an answer", "cores", "routers"],
        [_row(demand, cost, found) for demand, cost in needs(found)],
    )


def _row(demand: Demand, cost: Cost, found: Measured) -> list[str]:
    event = found.costs.event
    pools = found.pools
    nearest = min(pools, key=lambda workers: abs(math.log(workers / demand.workers)))
    more_s = max(pools[nearest].request_s - pools[8].request_s, 0.0)
    idle = pools[nearest].idle
    cores = (idle + demand.rate * (cost.all_s + more_s + demand.events * event.all_s)) / BUSY
    loop = (idle + demand.rate * (cost.loop_s + more_s + demand.events * event.loop_s)) / BUSY
    return [
        demand.what,
        f"{demand.workers:,}",
        f"{demand.rate:,g}",
        f"{demand.events:,}",
        two_digits(cores),
        f"{math.ceil(loop)}",
    ]
