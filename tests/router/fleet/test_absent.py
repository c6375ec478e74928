"""Tests of a worker that lacks a path: the router tells this from a refusal, hides it from clients,
and does not try the path there again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from policies.facts import Failure
from router.core.contract.actions import Dispatch, Reject
from router.http.reply import Framing, Outcome, ReplyHead
from router.kserve.http import ANSWERS
from router.request.missing_path import MissingPathFilter, is_missing_path
from router.upstream.collected_reply import CollectedReply
from tests.router.core.core_world import World

OURS = b'{"error":{"message":"no such path: /x","type":"NotFoundError","param":null,"code":404}}'
NO_MODEL = b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError"}}'
NO_RESPONSE = b'{"error":{"message":"Response with id \'r\' not found.","code":404}}'


@pytest.mark.parametrize(
    ("status", "body", "absent"),
    [
        (404, b'{"detail":"Not Found"}', True),
        (404, b"", True),
        (404, b"<html>404</html>", True),
        (404, b"404 page not found", True),
        (404, OURS, True),
        (405, b'{"detail":"Method Not Allowed"}', True),
        (501, b'{"error":{"message":"no"}}', True),
        (404, NO_MODEL, False),
        (404, NO_RESPONSE, False),
        (404, b'{"object":"error","message":"The model `x` does not exist."}', False),
        (404, b'{"error":"unknown model"}', False),
        (404, b'{"error":"Not Found"}', True),
        (501, b'{"error":"decoupled models are not for infer"}', False),
        (404, b'{"detail":"Model x not found"}', False),
        (404, b'{"detail":{"why":1}}', False),
    ],
)
def test_only_answers_about_the_path_count_as_a_missing_path(
    status: int, body: bytes, absent: bool
) -> None:
    assert is_missing_path(status, body) is absent


@pytest.mark.parametrize("escaped", [False, True])
def test_a_404_for_a_path_with_escapes_is_not_a_missing_path(escaped: bool) -> None:
    """A 404 for a path with escapes does not count as a missing path: Triton does not decode
    escapes, so any client could make a path seem missing for all others.
    """
    client, body = CollectedReply(99), b'{"error":"Not Found"}'
    sieve = MissingPathFilter(client, ANSWERS, escaped)
    sieve.head(ReplyHead(404, b"", (), Framing.LENGTH, len(body)))
    sieve.data(body)
    sieve.finish()
    outcome = sieve.outcome_for_client(Outcome(started_s=0.0))
    assert (outcome.error is None) == escaped == (client.body == body)


def arrive(world: World, needs: str | None, **fields: Any) -> Any:
    arrival = dataclasses.replace(world.arrival([1]), needs=needs, **fields)
    (action,) = world.core.on_arrival(arrival)
    return action


def test_a_request_bound_to_a_worker_goes_to_no_other_worker() -> None:
    world = World(workers=2)
    world.join(0)
    world.join(1)
    for only in (0, 1, 0):
        action = arrive(world, None, only=only)
        assert isinstance(action, Dispatch)
        assert action.worker_id == only
        failed = Failure(0.0, action.request_id, "worker", retry=True)
        (refused,) = world.core.on_failure(failed)
        assert isinstance(refused, Reject), "another one knows nothing of it"
    refused = arrive(world, None, only=7)
    assert isinstance(refused, Reject)
    assert (refused.status, refused.code) == (503, "sequence_lost")


def test_a_worker_that_lacks_a_path_gets_only_requests_for_other_paths() -> None:
    world = World(workers=2)
    world.join(0, lacks=frozenset({"/x"}))
    for _ in range(4):
        action = arrive(world, "/x")
        assert isinstance(action, Dispatch)
        assert action.worker_id == 1
    world.join(1, lacks=frozenset({"/x", "/y"}))
    refused = arrive(world, "/x")
    assert isinstance(refused, Reject)
    assert (refused.status, refused.code) == (404, "path_not_served")
    assert "/x" in refused.message
    assert isinstance(arrive(world, "/y"), Dispatch)
    assert isinstance(arrive(world, None), Dispatch)


def test_finding_a_worker_that_has_a_path_costs_no_attempts_or_retries() -> None:
    world = World(workers=8, max_attempts=2, retry_share=0.0, retries_per_s=0.0)
    action = arrive(world, "/x")
    for _ in range(7):
        assert isinstance(action, Dispatch)
        assert action.after_s == 0
        world.join(action.worker_id, lacks=frozenset({"/x"}))
        failure = Failure(world.now_s, action.request_id, "busy", retry=True, reason="absent")
        (action,) = world.core.on_failure(failure)
    assert isinstance(action, Dispatch)
    world.join(action.worker_id, lacks=frozenset({"/x"}))
    failure = Failure(world.now_s, action.request_id, "busy", retry=True, reason="absent")
    (action,) = world.core.on_failure(failure)
    assert isinstance(action, Reject)
    assert action.code == "path_not_served"
    assert all(worker.is_in for worker in world.core.workers)
    assert len(world.core.ledger) == 0


def test_a_request_limited_to_some_workers_goes_to_one_of_them() -> None:
    world = World(workers=4)
    seen = {arrive(world, None, among=(1, 3)).worker_id for _ in range(8)}
    assert seen == {1, 3}
    for among in ((), (7,)):
        refused = arrive(world, None, among=among)
        assert isinstance(refused, Reject)
        assert (refused.status, refused.code) == (503, "no_endpoint_in_subset")


def test_a_request_moved_to_another_worker_costs_no_attempt_or_retry() -> None:
    world = World(workers=3, max_attempts=2, retry_share=0.0, retries_per_s=0.0)
    arrival = world.arrival([1])
    (action,) = world.core.on_arrival(arrival)
    for _ in range(2):
        assert isinstance(action, Dispatch)
        other = (action.worker_id + 1) % 3
        rest = dataclasses.replace(arrival, only=other)
        moved = Failure(0.0, arrival.request_id, "busy", retry=True, reason="moved", rest=rest)
        (action,) = world.core.on_failure(moved)
        assert isinstance(action, Dispatch)
        assert (action.worker_id, action.after_s) == (other, 0.0)
        assert world.core.columns.requests.sum() == 1
    assert not any(w.health.failures for w in world.core.workers)
