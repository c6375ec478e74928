"""Tests of a stream whose worker is lost: a worker for the rest of the answer is chosen anew and
charged once.
"""

from __future__ import annotations

from dataclasses import replace

from policies.facts import Failure, Finish
from router.core.contract.actions import Dispatch
from tests.router.core.core_world import BLOCK, World, stored


def test_the_rest_of_an_answer_is_sent_where_its_longer_prompt_is_cached() -> None:
    world = World(workers=3, policy="kv_prefix")
    arrival = world.arrival([1, 2], stream=True)
    (first,) = world.core.on_arrival(arrival)
    assert isinstance(first, Dispatch)
    warm = next(n for n in (1, 2) if n != first.worker_id)
    world.events(warm, 0, stored([1, 2, 3]))
    rest = replace(world.arrival([1, 2, 3, 4]), request_id=arrival.request_id)
    (again,) = world.core.on_failure(
        Failure(0.0, arrival.request_id, "worker", retry=True, reason="early_close", rest=rest)
    )
    assert isinstance(again, Dispatch)
    assert (again.worker_id, again.decision.reason) == (warm, "migration")
    assert again.decision.hit_tokens == 3 * BLOCK
    charges = [world.core.ledger.on_worker(worker_id) for worker_id in range(3)]
    assert [len(of_worker) for of_worker in charges] == [int(n == warm) for n in range(3)]
    assert charges[warm][0].prompt_tokens == 4 * BLOCK
    world.core.on_finish(Finish(1.0, arrival.request_id))
    assert not len(world.core.ledger)
