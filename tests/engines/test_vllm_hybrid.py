"""Tests of the router with real vLLM and models with sliding windows or states: hits are as
expected.

Such a cache has a prefix only where each group of the model's layers has what it needs, which is
less than full attention alone would have. The caches are small, so blocks are evicted throughout.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from tests.effort import QUICK
from tests.engines.hits import above, counted, hits, unequal
from tests.engines.hybrid_models import HybridModel
from tests.engines.hybrid_traffic import LASTING, LONGEST_ANSWER, Traffic
from tests.engines.pool import Pool
from tests.live.stack import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

ALONE, AT_ONCE = (40, 40) if QUICK else (152, 152)
CLIENTS = 8
EVENT_WAIT_S = 0.05  # vLLM publishes a step's blocks in its own thread, and answers may overtake it
AFTERWARDS = 10  # requests that follow a crowd, one at a time
EXACT_SHARE = 0.99
WARMING = 3  # requests
ABOVE_AT_ONCE = 0.2  # share of requests whose blocks were evicted before their turn came
Served = tuple[HybridModel, Pool]
Noted = Callable[[str, object], None]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(hybrid: Served) -> AsyncIterator[Served]:
    """Yield a server that has reported its cache groups, which it does with its first blocks."""
    model, pool = hybrid
    await send_alone(pool, traffic_of(model, 0), WARMING)

    async def known() -> bool:
        row = await pool.router.row(0)
        return bool(row["cache_groups"])

    await until(known, "the cache groups to be known")
    await hits(pool, 0, WARMING)  # all lines are written
    yield model, pool


def traffic_of(model: HybridModel, seed: int, lasting: int = LASTING) -> Traffic:
    return Traffic(random.Random(seed), model.max_tokens - LONGEST_ANSWER, lasting)


async def send_alone(
    pool: Pool, traffic: Traffic, count: int, pause_s: float = EVENT_WAIT_S
) -> None:
    """Send `count` requests one after the other, with a pause before each."""
    for _ in range(count):
        await asyncio.sleep(pause_s)
        body = traffic.body()
        status, answer = await pool.ask("/v1/completions", body)
        assert status == 200, answer
        traffic.answered(body, answer)


async def test_cache_groups_are_known(served: Served) -> None:
    model, pool = served
    row = await pool.router.row(0)
    assert tuple(group["kind"] for group in row["cache_groups"] or ()) == model.limits
    assert row["block_size"] >= model.asked_size


async def test_hits_of_single_requests_are_as_expected(
    served: Served, record_property: Noted
) -> None:
    model, pool = served
    before = len(pool.logged())
    await send_alone(pool, traffic_of(model, 1), ALONE)
    seen = await hits(pool, before, ALONE)
    record_property(f"{model.name} alone", counted(seen))
    assert sum(cached > 0 for _, cached in seen) > ALONE / 2
    assert len(unequal(seen)) <= ALONE * (1 - EXACT_SHARE), unequal(seen)
    assert not above(seen)


async def test_the_index_of_groups_is_right_after_concurrent_requests(
    served: Served, record_property: Noted
) -> None:
    """After many requests at once, the index equals vLLM's table again, although expected blocks
    may be evicted before a request's turn comes.
    """
    model, pool = served
    before = len(pool.logged())
    clients = [traffic_of(model, 2 + n, lasting=1) for n in range(CLIENTS)]
    for one in clients:
        one.roots = clients[0].roots
    await asyncio.gather(*(send_alone(pool, one, AT_ONCE // CLIENTS, 0.0) for one in clients))
    seen = await hits(pool, before, AT_ONCE)
    record_property(f"{model.name} at once", counted(seen))
    await pool.router.assert_idle()
    await send_alone(pool, clients[0], AFTERWARDS)
    after = await hits(pool, before + AT_ONCE, AFTERWARDS)
    assert len(above(seen)) <= AT_ONCE * ABOVE_AT_ONCE, above(seen)
    assert not unequal(after)
