"""Tests of a worker that answers that it lacks a model which another worker has."""

from __future__ import annotations

import pytest

from policies.facts import Failure
from router.core.contract.actions import Dispatch, Reject
from router.fleet.member import Denial
from router.request.refusals import denies_model
from tests.router.core.core_world import World

VLLM = b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","code":404}}'
OLD_VLLM = b'{"object":"error","message":"The model `x` does not exist.","code":404}'
OPENAI = b'{"error":{"message":"No.","type":"invalid_request_error","code":"model_not_found"}}'
SGLANG = (
    b'{"object":"error","message":"The following requested LoRA adapters are not loaded: [\'x\']"}'
)
TRITON = b'{"error":"Request for unknown model: \'x\' is not found"}'
NO_VERSION = b'{"error":"Request for unknown model: \'x\' version 9 is not found"}'
NONE_LOADED = b'{"error":"Request for unknown model: \'x\' has no available versions"}'
OLLAMA = b'{"error":{"message":"model \\"x\\" not found, try pulling it first"}}'


@pytest.mark.parametrize(
    ("status", "body", "denies"),
    [
        (404, VLLM, True),
        (404, OLD_VLLM, True),
        (404, OPENAI, True),
        (400, OPENAI, True),
        (400, SGLANG, True),
        (404, TRITON, True),
        (400, NONE_LOADED, True),
        (404, OLLAMA, True),
        (404, b'{"detail":"Model not found"}', True),
        (404, b'{"message":"Model not found","type":"Not Found","code":404}', True),
        (404, NO_VERSION, False),
        (400, b'{"error":{"message":"x is not a valid temperature"}}', False),
        (400, b'{"error":{"message":"the tool y does not exist in model z"}}', False),
        (404, b'{"detail":"Not Found"}', False),
        (404, b'{"error":{"message":"Response with id \'r\' not found."}}', False),
        (404, b'{"error":{"message":"The model `other-one` does not exist."}}', False),
        (422, VLLM, False),
        (404, b"<html>model x not found</html>", False),
        (404, b"", False),
        (404, VLLM + b" " * 20_000, False),
        (404, b"[" * 9_000, False),
        (404, b'{"error":17}', False),
    ],
)
def test_answers_that_deny_a_model_are_recognized(status: int, body: bytes, denies: bool) -> None:
    assert denies_model(status, body, "x") is denies


def fail_with_denial(world: World, request_id: int) -> Dispatch | Reject:
    fact = Failure(world.now_s, request_id, "busy", retry=True, reason="no_model")
    (action,) = world.core.on_failure(fact)
    assert isinstance(action, Dispatch | Reject)
    return action


def test_finding_a_worker_that_has_a_model_costs_no_attempts_or_retries() -> None:
    world = World(workers=8, max_attempts=2, retry_share=0.0, retries_per_s=0.0)
    (action,) = world.core.on_arrival(world.arrival([1]))
    for left in reversed(range(8)):
        assert isinstance(action, Dispatch)
        assert action.after_s == 0
        world.join(action.worker_id, denied=frozenset({"m"}))
        action = fail_with_denial(world, action.request_id)
        assert isinstance(action, Dispatch) == (left > 0)
    assert (action.status, action.code) == (404, "model_not_found")
    assert all(worker.is_in for worker in world.core.workers)
    assert len(world.core.ledger) == 0
    # Where everybody says so anyone may be asked, and once is enough.
    (action,) = world.core.on_arrival(world.arrival([1]))
    assert isinstance(action, Dispatch)
    assert fail_with_denial(world, action.request_id).code == "model_not_found"


def test_a_worker_that_denies_a_model_gets_requests_for_its_other_models() -> None:
    world = World(workers=0, policy="round_robin")
    for worker_id in range(2):
        world.join(worker_id, models=("m", "lora"), adapters=frozenset({"lora"}))
    world.join(0, models=("m", "lora"), adapters=frozenset({"lora"}), denied=frozenset({"lora"}))
    for model, expected in (("lora", {1}), ("m", {0, 1})):
        seen = set()
        for i in range(8):
            (action,) = world.core.on_arrival(world.arrival([i], model=model))
            seen.add(action.worker_id)
        assert seen == expected


def test_a_busy_worker_gets_requests_for_a_model_that_no_other_has() -> None:
    world = World(workers=2, retry_share=0.0, retries_per_s=0.0)
    (action,) = world.core.on_arrival(world.arrival([1], only=0))
    world.core.on_failure(Failure(0.0, action.request_id, "busy", False, "busy", busy_s=5.0))
    (action,) = world.core.on_arrival(world.arrival([1]))
    assert action.worker_id == 1
    world.join(1, denied=frozenset({"m"}))
    again = fail_with_denial(world, action.request_id)
    assert isinstance(again, Dispatch)
    assert again.worker_id == 0


def test_each_denial_extends_the_time_a_listed_model_is_distrusted() -> None:
    lasts = []
    for times in (1, 2, 3, 16):
        denial = Denial(10.0, times)
        lasts.append(next(s for s in range(1, 99) if not denial.outlasts(10.0 + s)))
    assert lasts == [1, 2, 4, 60]
