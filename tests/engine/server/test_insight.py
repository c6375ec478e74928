"""Tests of a worker's reports on itself over HTTP while one request runs and another waits."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.scheduler.types import SchedulerSettings
from tests.engine.harness import eventually, running

COMPLETIONS = "/v1/completions"
PROMPT = list(range(100, 140))
ONE = SchedulerSettings(max_batch_size=1)


async def test_a_waiting_request_is_explained_and_health_shows_its_reason() -> None:
    async with running(scheduler=ONE, speed=1.0) as worker:
        body = {"prompt": PROMPT, "max_tokens": 1000, "stream": True}
        mine = {"X-Request-Id": "mine"}
        async with (
            worker.http.post(worker.url + COMPLETIONS, json=body),
            worker.http.post(worker.url + COMPLETIONS, json=body, headers=mine),
        ):
            scheduler = worker.worker.runner.scheduler
            totals = scheduler.not_scheduled_total
            await eventually(lambda: sum(totals.values()) > 0, "one waits and was looked at")
            health = json.loads(await worker.get("/health"))
            assert health == {
                "status": "ok",
                "running": 1,
                "waiting": 1,
                "waiting_for": "max_batch_size",
            }
            for name in ("mine", "cmpl-mine"):
                (said,) = json.loads(await worker.get(f"/explain/{name}"))["sequences"]
                assert (said["state"], said["queue_position"]) == ("waiting", 0)
                assert said["reason"] == "max_batch_size"
                assert [wait["reason"] for wait in said["waits"]] == ["max_batch_size"]
                assert said["admission_steps"] > 1
            text = (await worker.get("/metrics")).decode()
            kinds = {
                sample.labels["kind"]: sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name == "warmroute_engine_requests"
            }
            assert kinds == {"active": 2, "scheduled": 1, "max": 1}
        await eventually(lambda: worker.worker.unfinished == 0, "both clients left")
        status, answer = await get(worker, "/explain/mine")
        assert (status, "mine" in answer["error"]["message"]) == (404, True)


async def test_steps_are_shown_oldest_first() -> None:
    async with running() as worker:
        await worker.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 5})
        steps = json.loads(await worker.get("/debug/steps"))["steps"]
        assert [step["number"] for step in steps] == [0, 1, 2, 3, 4]
        assert [step["prefill_tokens"] for step in steps] == [40, 0, 0, 0, 0]
        assert all(step["batch_size"] == 1 for step in steps)
        assert all(step["compute_ms"] > 0 and step["modelled_ms"] > 0 for step in steps)
        last = json.loads(await worker.get("/debug/steps?last=2"))["steps"]
        assert [step["number"] for step in last] == [3, 4]


@pytest.mark.parametrize("last", ["-1", "x", "1e3", "", "9999999"])
async def test_a_bad_number_of_steps_is_rejected(last: str) -> None:
    async with running() as worker:
        status, answer = await get(worker, f"/debug/steps?last={last}")
        assert (status, answer["error"]["param"]) == (400, "last")


async def get(worker, path):
    async with worker.http.get(worker.url + path) as reply:
        return reply.status, await reply.json()
