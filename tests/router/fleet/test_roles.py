"""Tests of roles that change while workers serve: which may change, when, and what is reported if a
role is missing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest
import zmq.asyncio
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import Role, WorkerChange, WorkerFacts
from router.core.workers.table import halves_missing, serves
from router.engines.spec import WorkerSpec
from router.engines.worker_spec import parse_worker_spec
from router.fleet import member as member_module
from router.fleet.context import FleetContext, FleetTerms, WorkerFact
from router.fleet.manager import FleetManager, RoleRefusedError, reconcile
from router.fleet.member import Member
from router.fleet.recognize import Recognized, with_role, with_thresholds
from router.fleet.wanted import WantedWorker
from router.http.reply import RelayLimits
from tests.router.admin_port import admin
from tests.router.waiting import until
from tests.served_app import served_app

ROLES: tuple[Role, ...] = ("both", "prefill", "decode")


@dataclass
class Pool:
    """A fleet for which the test counts the requests. Lifetime: test."""

    manager: FleetManager
    told: list[WorkerFact]
    requests: dict[int, int] = field(default_factory=dict)

    async def join(self, *specs: str) -> None:
        for text in specs:
            member = self.manager.add(parse_worker_spec(text))
            await until(lambda m=member: m.ready, f"{text} to be ready")  # type: ignore[misc]

    def turn(self, role: Role, *numbers: int) -> None:
        self.manager.change_role([self.manager.members[n] for n in numbers], role, "test")

    def sweep(self) -> None:
        self.manager.sweep(lambda worker_id: self.requests.get(worker_id, 0))

    async def until_role(self, number: int, role: Role) -> None:
        def there() -> bool:
            self.sweep()
            member = self.manager.members[number]
            known = member.recognized
            return known is not None and known.facts.role == role and member.ready

        await until(there, f"{number} to {role}")

    def last_change(self, number: int) -> WorkerChange:
        mine = [f for f in self.told if isinstance(f, WorkerChange) and f.worker_id == number]
        return mine[-1]


@asynccontextmanager
async def pool(*specs: str, drain_s: float = 600.0) -> AsyncIterator[Pool]:
    told: list[WorkerFact] = []
    context = zmq.asyncio.Context()
    terms = FleetTerms(0.5, 0.02, 0.02, 100, RelayLimits(), drain_s=drain_s)
    async with aiohttp.ClientSession() as http:
        shared = FleetContext(http, context, time.monotonic, told.append, terms)
        one = Pool(FleetManager(shared, 8), told)
        await one.join(*specs)
        yield one
        await one.manager.aclose()
    context.destroy(linger=0)


async def silence(*_: object) -> str:
    return ""


@pytest.fixture(autouse=True)
def always_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recognize every URL as an engine of the kind in its options; all kinds except SGLang can
    serve alone.
    """

    async def known(http: object, spec: WorkerSpec, *terms: object) -> Recognized:
        await asyncio.sleep(0)
        facts = WorkerFacts(name=spec.url, models=("m",), block_size=16)
        kind = spec.kind or "vllm"
        recognized = Recognized(kind, facts, None, own_group=f"{kind} 1")
        return alone(with_role(with_thresholds(recognized, spec), spec))

    def alone(one: Recognized) -> Recognized:
        return with_serves_alone(one, one.kind != "sglang" or one.facts.role == "both")

    real = with_role
    both: Callable[..., Recognized] = lambda one, spec: alone(real(one, spec))  # noqa: E731
    monkeypatch.setattr(member_module, "recognize", known)
    monkeypatch.setattr(member_module, "with_role", both)
    monkeypatch.setattr("router.fleet.manager.with_role", both)
    monkeypatch.setattr(member_module.Member, "_complaint", silence)


def with_serves_alone(one: Recognized, serves_alone: bool) -> Recognized:
    return replace(one, facts=replace(one.facts, serves_alone=serves_alone))


P, D = "http://h:1,role=prefill", "http://h:2,role=decode"


async def test_a_worker_drains_before_it_takes_its_new_role() -> None:
    async with pool(P, "http://h:3,role=prefill", D) as one:
        one.requests[0] = 2
        one.turn("decode", 0)
        one.sweep()
        member = one.manager.members[0]
        assert (one.last_change(0).state, member.spec.role) == ("draining", "prefill")
        one.requests[0] = 0
        one.sweep()
        change = one.last_change(0)
        assert (change.state, member.spec.role, member.turning) == ("ready", "decode", None)
        roles = [f.spec.role for f in one.told if isinstance(f, WorkerChange) and f.spec]
        assert roles[-1] == "decode"
        facts = member.recognized.facts if member.recognized else None
        assert facts is not None
        assert (facts.role, facts.group) == ("decode", "vllm 1")


async def test_requests_still_running_after_drain_s_continue_in_the_new_role() -> None:
    async with pool(P, "http://h:3,role=prefill", D, drain_s=0.05) as one:
        one.requests[0] = 1
        one.turn("decode", 0)
        await one.until_role(0, "decode")
        assert one.requests[0] == 1


async def test_undrain_cancels_a_role_change_and_a_drain_survives_one() -> None:
    async with pool(P, "http://h:3,role=prefill", D) as one:
        one.requests[0] = 1
        one.turn("decode", 0)
        one.manager.members[0].undrain("test")
        one.requests[0] = 0
        one.sweep()
        assert one.manager.members[0].spec.role == "prefill"
        one.manager.members[1].drain("test")
        one.turn("decode", 1)
        one.sweep()
        assert (one.last_change(1).state, one.manager.members[1].spec.role) == (
            "draining",
            "decode",
        )


async def test_a_reload_keeps_a_changed_role() -> None:
    async with pool(P, "http://h:3,role=prefill", D) as one:
        one.turn("both", 0)
        one.sweep()
        texts = (f"{P},weight=2", "http://h:3,role=prefill", D)
        assert reconcile(one.manager, [WantedWorker(parse_worker_spec(t)) for t in texts]) == []
        member = one.manager.members[0]
        assert (member.spec.role, member.spec.weight, member.leaving) == ("both", 2.0, False)


async def test_the_only_worker_changes_its_role_without_draining() -> None:
    async with pool("http://h:1") as one:
        one.turn("decode", 0)
        assert one.manager.members[0].spec.role == "decode"
        assert "draining" not in [f.state for f in one.told if isinstance(f, WorkerChange)]


@pytest.mark.parametrize(
    ("specs", "role", "numbers", "says"),
    [
        ((P.replace(",", ",kind=sglang,"), D.replace(",", ",kind=sglang,")), "decode", [0],
         "the model 'm' would have no worker that prefills while worker 0"),
        ((P.replace(",", ",kind=sglang,"),), "both", [0], "prefill or decode only"),
    ],
)  # fmt: skip
async def test_a_role_change_that_leaves_a_role_missing_is_refused(
    specs: tuple[str, ...], role: Role, numbers: list[int], says: str
) -> None:
    async with pool(*specs) as one:
        with pytest.raises(RoleRefusedError, match=says):
            one.turn(role, *numbers)
        assert all(m.ready and m.turning is None for m in one.manager.members.values())


async def test_an_engine_gets_its_new_role_only_once_it_is_idle() -> None:
    """An engine that has to be told its role is told once it is idle; SGLang refuses while it has
    requests, for instance those of another router.
    """
    asked: list[Any] = []

    async def switch(request: web.Request) -> web.Response:
        asked.append(await request.json())
        if len(asked) < 3:
            return web.json_response({"success": False, "message": "not idle"}, status=400)
        return web.json_response({"success": True})

    app = web.Application()
    app.router.add_post("/pd_role_switch", switch)
    more = [text.replace(",", ",kind=sglang,") for text in ("http://h:3,role=prefill", D)]
    async with served_app(app) as url, pool(f"{url},kind=sglang,role=prefill", *more) as one:
        one.requests[0] = 1
        one.turn("decode", 0)
        for _ in range(3):
            one.sweep()
            await asyncio.sleep(0)
        assert asked == [], "not while it has requests"
        one.requests[0] = 0
        await one.until_role(0, "decode")
        assert asked == [{"new_role": "decode"}] * 3


async def test_an_engine_that_refuses_a_new_role_keeps_its_role() -> None:
    async def switch(request: web.Request) -> web.Response:
        return web.json_response({"success": False}, status=400)

    app = web.Application()
    app.router.add_post("/pd_role_switch", switch)
    more = [text.replace(",", ",kind=sglang,") for text in ("http://h:3,role=prefill", D)]
    async with (
        served_app(app) as url,
        pool(f"{url},kind=sglang,role=prefill", *more, drain_s=0.1) as one,
    ):
        one.turn("decode", 0)
        assert not one.manager.members[0].ready
        await one.until_role(0, "prefill")
        assert one.manager.members[0].turning is None


OPERATIONS = ("turn", "drain", "undrain", "requests", "sweep", "leave")


@pytest.mark.parametrize("seed", range(40))
async def test_any_sequence_of_role_requests_leaves_every_worker_in_service(seed: int) -> None:
    """After any requests for roles in any order, each worker has a role that was requested and
    takes requests, unless its operator drained it.
    """
    draw = random.Random(seed)
    async with pool(P, "http://h:3,role=prefill", D, "http://h:4,role=decode") as one:
        drained, asked = set[int](), {n: {m.spec.role} for n, m in one.manager.members.items()}
        for _ in range(40):
            what, number = draw.choice(OPERATIONS), draw.choice(list(one.manager.members))
            member = one.manager.members[number]
            if what == "turn":
                role = draw.choice(ROLES)
                with suppress(RoleRefusedError):
                    one.turn(role, number)
                    asked[number].add(role)
            elif what == "drain":
                member.drain("test")
                drained.add(number)
            elif what == "undrain" and not member.leaving:
                member.undrain("test")
                drained.discard(number)
            elif what == "leave" and draw.random() < 0.05:
                one.manager.leave(member, "test")
            elif what == "requests":
                one.requests[number] = draw.choice((0, 0, 1, 3))
            else:
                one.sweep()
        one.requests.clear()
        one.sweep()
        for number, member in one.manager.members.items():
            assert member.turning is None or member.leaving
            assert member.spec.role in asked[number]
            if not member.leaving:
                assert one.last_change(number).state == (
                    "draining" if number in drained else "ready"
                )


def facts_of(role: Role, group: str | None, alone: bool) -> WorkerFacts:
    return WorkerFacts("w", ("m",), 16, role, group, alone)


WORKERS = st.builds(
    facts_of, st.sampled_from(ROLES), st.sampled_from([None, "g", "h"]), st.booleans()
)


@given(st.lists(WORKERS, min_size=1, max_size=6))
def test_the_report_of_missing_roles_agrees_with_the_ability_to_serve(
    workers: list[WorkerFacts],
) -> None:
    """The report of missing roles and the ability to serve agree: if no worker can serve, a missing
    role is named, and if each role has its counterpart, some worker can serve.
    """
    missing = halves_missing(workers)
    if not serves(workers):
        assert missing
    if not missing:
        assert serves(workers)
    for half in missing:
        same = [w for w in workers if w.group == half.group]
        assert any(w.role == half.role for w in same)
        assert half.group is None or not any(w.role not in (half.role,) for w in same)


def test_the_report_of_a_missing_role_has_its_group() -> None:
    one, other = facts_of("prefill", "g", False), facts_of("decode", "h", False)
    assert [str(half) for half in halves_missing([one, other])] == [
        "nobody of the group 'g' decodes: 1 have the role prefill",
        "nobody of the group 'h' prefills: 1 have the role decode",
    ]
    assert not serves([one, other])


async def test_a_pool_with_one_role_missing_is_not_ready_and_gives_the_reason() -> None:
    """A pool with only one of the two roles is not ready and says why, because its engines cannot
    serve alone; a second model that is served makes the router ready.
    """
    async with admin() as one:
        tell = one.router.dispatcher.handle_fact

        def join(number: int, facts: WorkerFacts) -> None:
            tell(WorkerChange(0.0, number, "ready", facts))

        join(100, facts_of("prefill", "g", False))
        status, shown = await one.request("GET", "/ready")
        why = "the model 'm' cannot be served: nobody of the group 'g' decodes: 1 have the role"
        assert status == 503
        assert shown["reasons"][0].startswith(why)
        assert "nobody of the group 'g' decodes" in shown["halves_missing"]["m"][0]
        one.router.service.log_unusable_roles()
        join(101, replace(facts_of("both", None, True), models=("other",)))
        assert (await one.request("GET", "/ready"))[0] == 200
        status, shown = await one.request("GET", "/ready?model=m")
        assert status == 503
        assert shown["reasons"][0].startswith(why)
        tell(WorkerChange(0.0, 101, "gone"))
        join(102, facts_of("decode", "g", False))
        status, shown = await one.request("GET", "/ready?model=m")
        assert (status, "halves_missing" in shown) == (200, False)


async def test_missing_roles_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with admin() as one:
        tell, service = one.router.dispatcher.handle_fact, one.router.service
        tell(WorkerChange(0.0, 100, "ready", facts_of("prefill", "g", False)))
        for _ in range(3):
            service.log_unusable_roles()
        assert caplog.text.count("nobody of the group 'g' decodes") == 1
        tell(WorkerChange(0.0, 101, "ready", facts_of("decode", "g", False)))
        service.log_unusable_roles()
        assert "no longer so: model 'm': nobody of the group 'g' decodes" in caplog.text


async def test_a_restarted_engine_has_the_role_of_its_command_line() -> None:
    """A restarted engine has the role of its command line, whatever role it was told before;
    engines that are not told a role keep theirs.
    """
    async with pool(P.replace(",", ",kind=sglang,"), "http://h:3") as one:
        for member in one.manager.members.values():
            member.turn("decode", "test")
        first, second = one.manager.members.values()
        cases: tuple[tuple[Member, Role, Role], ...]
        cases = (first, "prefill", "prefill"), (second, "both", "decode")
        for member, own, role in cases:
            assert member.recognized is not None
            said = member._with_changed_role(replace(member.recognized, own_role=own))
            assert (said.facts.role, member.spec.role) == (role, role)
        assert (first.turned, second.turned) == (None, "decode")
