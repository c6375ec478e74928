"""Tests of tickets, a handler's claim on a dispatched request: however the handler ends, the core
learns of the request's end exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest

from policies.facts import KvEvents, Tick, WorkerChange
from policies.load import LoadedPolicy
from router.core.contract.actions import Dispatch, Reject
from router.core.core import RouterCore
from router.core.placement.guard import PolicyFaultError
from router.request.dispatcher import Dispatcher, FleetCalls, Ticket
from tests.router.core.core_world import World


class ScriptedPolicy:
    """A policy whose costs come from the function that the test has set. Lifetime: test."""

    def __init__(self) -> None:
        self.answer: Callable[[int], Any] = np.zeros

    def costs(self, request, fleet, state):
        return self.answer(len(fleet))


def hold(rows: int) -> Any:
    return np.full(rows, np.inf)


class DispatcherWorld(World):
    """A dispatcher in front of a core with two workers. Lifetime: test."""

    def __init__(self) -> None:
        super().__init__(workers=2)
        self.policy = ScriptedPolicy()
        loaded = LoadedPolicy("scripted", {}, 0.0, self.policy)
        self.failures: list[PolicyFaultError] = []
        self.core = RouterCore(loaded, self.core.settings, report=self.failures.append)
        for worker_id in range(2):
            self.join(worker_id)
        self.asked: list[tuple[object, ...]] = []  # of the fleet
        names = [field.name for field in fields(FleetCalls)]
        asks = FleetCalls(*(partial(self.note, name) for name in names))
        self.dispatcher = Dispatcher(self.core, lambda: self.now_s, asks)

    def note(self, *call: object) -> None:
        self.asked.append(call)

    def arrive(self, ticket: Ticket, **more: Any) -> None:
        number = self.dispatcher.next_request_id()
        ticket.arrive(self.arrival([1, 2], request_id=number, **more))

    def ticket(self) -> closing[Ticket]:
        return closing(Ticket(self.dispatcher))

    def assert_idle(self) -> None:
        assert self.core.inflight_requests == self.core.held_requests == len(self.core.ledger) == 0
        assert not self.core.columns.requests.any()
        assert not self.dispatcher._tickets


async def test_a_finished_request_leaves_no_charge() -> None:
    desk = DispatcherWorld()
    with desk.ticket() as ticket:
        desk.arrive(ticket)
        assert isinstance(await ticket.next_action(), Dispatch)
        ticket.first_token(0.1)
        ticket.progress(0.2, 3)
        ticket.finish(8, 4, 3)
    desk.assert_idle()


@pytest.mark.parametrize("moment", ["arrived", "dispatched", "streaming"])
async def test_a_handler_that_dies_at_any_moment_leaves_no_charge(moment: str) -> None:
    desk = DispatcherWorld()

    async def handler() -> None:
        with desk.ticket() as ticket:
            desk.arrive(ticket)
            if moment != "arrived":
                await ticket.next_action()
            if moment == "streaming":
                ticket.first_token(0.1)
            raise RuntimeError("died")

    with pytest.raises(RuntimeError, match="died"):
        await handler()
    desk.assert_idle()


async def test_a_client_that_leaves_while_held_leaves_no_charge() -> None:
    desk = DispatcherWorld()
    desk.policy.answer = hold

    async def handler() -> None:
        with desk.ticket() as ticket:
            desk.arrive(ticket)
            await ticket.next_action()

    waiting = asyncio.create_task(handler())
    await asyncio.sleep(0)
    assert desk.core.held_requests == 1
    waiting.cancel()
    await asyncio.wait([waiting])
    desk.assert_idle()


async def test_a_client_that_leaves_during_dispatch_leaves_no_charge() -> None:
    """A client that leaves just as its request is dispatched leaves no charge: the core has charged
    the dispatch and put it into the ticket, but the handler never fetches it.
    """
    desk = DispatcherWorld()
    desk.policy.answer = hold

    async def handler() -> None:
        with desk.ticket() as ticket:
            desk.arrive(ticket)
            await ticket.next_action()
            raise AssertionError("it was cancelled before")

    waiting = asyncio.create_task(handler())
    await asyncio.sleep(0)
    desk.policy.answer = np.zeros
    desk.dispatcher.handle_fact(Tick(1.0))
    assert desk.core.columns.requests.sum() == 1
    waiting.cancel()
    await asyncio.wait([waiting])
    desk.assert_idle()


async def test_a_held_request_gets_503_after_the_hold_time() -> None:
    desk = DispatcherWorld()
    desk.policy.answer = hold
    with desk.ticket() as ticket:
        desk.arrive(ticket)
        desk.dispatcher.handle_fact(Tick(desk.core.settings.hold_s + 1))
        action = await ticket.next_action()
        assert isinstance(action, Reject)
        assert (action.status, action.code) == (503, "hold_timeout")
        assert not ticket.is_open
    desk.assert_idle()


async def test_each_retry_goes_to_another_worker_and_the_last_one_is_refused() -> None:
    desk = DispatcherWorld()
    with desk.ticket() as ticket:
        desk.arrive(ticket)
        seen = set()
        while isinstance(action := await ticket.next_action(), Dispatch):
            seen.add(action.worker_id)
            ticket.fail("worker", retry=True, reason="connect")
        assert seen == {0, 1}
        assert action.status == 502
    desk.assert_idle()


async def test_a_request_of_a_removed_worker_is_released_once_and_may_be_retried() -> None:
    desk = DispatcherWorld()
    with desk.ticket() as ticket:
        desk.arrive(ticket)
        first = await ticket.next_action()
        assert isinstance(first, Dispatch)
        desk.dispatcher.handle_fact(WorkerChange(0.5, first.worker_id, "gone"))
        assert not desk.core.columns.requests.any()
        ticket.first_token(0.6)  # bytes that were under way
        ticket.fail("worker", retry=True, reason="early_close")
        second = await ticket.next_action()
        assert isinstance(second, Dispatch)
        assert second.worker_id != first.worker_id
        ticket.finish(None, None, None)
    desk.assert_idle()


async def test_a_failing_fallback_policy_gives_500_and_leaves_no_charge() -> None:
    desk = DispatcherWorld()
    desk.policy.answer = lambda rows: np.full(rows, np.nan)
    desk.core.guard.fallback = LoadedPolicy("a defect", {}, 0.0, desk.policy)
    with desk.ticket() as ticket:
        desk.arrive(ticket)
        action = await ticket.next_action()
        assert isinstance(action, Reject)
        assert (action.status, action.code) == (500, "policy_failed")
    desk.assert_idle()
    assert [fault.policy for fault in desk.failures] == ["scripted", "a defect"]


async def test_a_resync_goes_to_its_worker() -> None:
    desk = DispatcherWorld()
    desk.dispatcher.handle_fact(KvEvents(0.0, 1, 4, ()))
    assert desk.asked == [("resync", 1, 0)]


def test_an_object_that_is_no_fact_is_refused() -> None:
    with pytest.raises(TypeError, match="not a fact"):
        DispatcherWorld().dispatcher.handle_fact("nonsense")  # type: ignore[arg-type]
