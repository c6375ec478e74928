"""Tests of engines' states while they serve: slow to answer probes, asleep, not ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import zmq.asyncio

from router.assembly import Router
from router.core.workers.kv_state import KvState
from router.engines.worker_spec import parse_worker_spec
from router.fleet.member import Member
from router.settings.schema import Config, Intervals, Limits, TimeoutSettings
from tests.router.engines.engine_pages import HANGS, MODELS, engine, recognized
from tests.router.events.feed_wire import Publisher, pack, publisher
from tests.router.sglang_pages import SGLANG
from tests.router.triton_pages import BACKEND, FRESH_BACKEND, TRITON
from tests.router.vllm_pages import METRICS, VLLM
from tests.router.waiting import until

PROBE_S, HEALTH_S = 0.1, 0.05
GROWN = 'vllm:prefix_cache_queries_total{engine="0",model_name="m"} %d\n'
SLEEP = 'vllm:engine_sleep_state{engine="0",sleep_state="%s"} 1\n'


@asynccontextmanager
async def ready_worker(
    pages: dict[str, Any], asked: list[str], limits: Limits | None = None
) -> AsyncIterator[Member]:
    """Yield a worker with these pages once it is ready."""
    config = Config(
        limits=limits or Limits(),
        intervals=Intervals(load_report_s=0.05, health_s=HEALTH_S),
        timeouts=TimeoutSettings(probe_s=PROBE_S),
    )
    async with engine(pages, asked) as url, aiohttp.ClientSession() as http:
        router = Router(config, http)
        try:
            member = router.fleet.add(parse_worker_spec(url))
            await until(lambda: member.ready, "it to be ready")
            yield member
        finally:
            await router.aclose()


async def test_sglang_has_more_time_to_answer_a_probe() -> None:
    """An SGLang engine may take longer than others to answer a probe, since its answer waits for
    its scheduler.
    """
    asked: list[str] = []

    async def slow() -> str:
        await asyncio.sleep(3 * PROBE_S)
        return "ok"

    async with ready_worker({**SGLANG, "/health": slow}, asked) as member:
        await until(lambda: asked.count("/health") > 3, "some probes")
        assert member.ready
        assert member.trouble == ""


async def test_another_engine_that_answers_a_probe_as_slowly_is_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[str] = []

    async def slow() -> str:
        await asyncio.sleep(3 * PROBE_S)
        return "ok"

    async with ready_worker({**VLLM, "/health": slow}, asked):
        await until(lambda: "is silent: GET /health: " in caplog.text, "it to be silent")


async def test_an_engine_that_hangs_after_a_restart_is_silent() -> None:
    """An engine that restarts and then hangs counts as silent from the time at which its probes
    would have been unanswered; it serves while it is recognized again.
    """
    asked: list[str] = []
    pages = {**VLLM, "/health": "ok", "/metrics": METRICS + GROWN % 9}
    async with ready_worker(pages, asked) as member:
        seen = asked.count("/metrics")
        await until(lambda: asked.count("/metrics") > seen + 1, "its figures to be read")
        pages |= {"/v1/models": HANGS, "/health": HANGS, "/metrics": METRICS + GROWN % 3}
        await until(lambda: member.silent_since_s is not None, "it to be silent")
        assert member.trouble
        pages |= {"/v1/models": MODELS, "/health": "ok"}
        await until(lambda: member.silent_since_s is None, "it to be back")


async def test_an_engine_put_to_sleep_is_down_until_it_wakes() -> None:
    pages = {**VLLM, "/health": "ok", "/metrics": METRICS + SLEEP % "awake"}
    async with ready_worker(pages, []) as member:
        pages["/metrics"] = METRICS + SLEEP % "weights_offloaded"
        await until(lambda: "sleeps; POST /wake_up" in member.trouble, "it to sleep")
        assert not member.ready
        pages["/metrics"] = METRICS + SLEEP % "awake"
        await until(lambda: member.ready, "it to wake")


async def test_a_paused_engine_gets_no_request_until_it_is_resumed() -> None:
    """A paused engine gets no request until it is resumed, although its health probes are answered
    all the time and its metrics do not show the pause.
    """
    pages = {**VLLM, "/health": "ok", "/is_paused": {"is_paused": False}}
    async with ready_worker(pages, []) as member:
        pages["/is_paused"] = {"is_paused": True}
        await until(lambda: "is paused; POST /resume" in member.trouble, "it to be paused")
        assert not member.ready
        pages["/is_paused"] = {"is_paused": False}
        await until(lambda: member.ready, "it to be resumed")
        assert member.trouble == ""


async def test_an_idle_router_polls_for_pauses_as_rarely_as_for_load() -> None:
    idle = METRICS.replace("} 2.0", "} 0.0").replace("} 1.0", "} 0.0")
    pages = {**VLLM, "/health": "ok", "/metrics": idle, "/is_paused": {"is_paused": False}}
    asked: list[str] = []
    async with ready_worker(pages, asked) as member:
        member._context.busy.clear()
        await until(lambda: asked.count("/metrics") > 1, "what went on before to be over")
        asked.clear()
        await until(lambda: asked.count("/metrics") >= 2, "it to be asked for its load")
        assert 1 <= asked.count("/is_paused") <= 4  # else eight for each


async def test_an_engine_without_a_valid_pause_answer_counts_as_not_paused() -> None:
    pages = {**VLLM, "/health": "ok", "/is_paused": HANGS}
    asked: list[str] = []
    async with ready_worker(pages, asked) as member:
        await until(lambda: asked.count("/is_paused") > 3, "it to be asked")
        for nonsense in (500, "no JSON", {"is_paused": "yes"}, [True]):
            pages["/is_paused"] = nonsense
            asked.clear()
            await until(lambda: asked.count("/is_paused") > 2, "it to be asked")
            assert member.ready
        pages["/is_paused"] = {"is_paused": True}
        await until(lambda: not member.ready, "it to be paused")


async def test_an_engine_that_sleeps_at_level_0_is_down_until_it_wakes() -> None:
    """An engine that sleeps at level 0 is down until it wakes, although it has released no memory
    and none of its sleep states is 1.
    """
    level_0 = (SLEEP % "awake").replace(" 1", " 0") + (SLEEP % "discard_all").replace(" 1", " 0")
    pages = {**VLLM, "/health": "ok"}
    async with ready_worker(pages, []) as member:
        pages["/metrics"] = METRICS + level_0
        await until(lambda: "sleeps; POST /wake_up" in member.trouble, "it to sleep")
        pages["/metrics"] = METRICS + SLEEP % "awake"
        await until(lambda: member.ready, "it to wake")


RESET = 'http_requests_total{handler="/reset_prefix_cache",method="POST",status="2xx"} %d.0\n'
IDLE = METRICS.replace('"} 2.0', '"} 0.0').replace('"m"} 1.0', '"m"} 0.0').replace('"32"', '"2"')
CLEARED = ["AllBlocksCleared"]


def store_events(*blocks: int) -> list[Any]:
    """Return store events of these blocks in the form of `payload`."""
    return [["BlockStored", [n], None, [n, n], 2, None, "GPU", None, None, 0] for n in blocks]


@dataclass
class Engine:
    """A vLLM engine with KV events. Lifetime: test.

    Like the real one, it reports only with its next step that its cache was emptied.
    """

    pages: dict[str, Any]
    events: Publisher
    member: Member
    kv: Callable[[], KvState]

    async def step(self, *events: Any) -> None:
        await self.events.send(len(self.events.kept), pack(*events))

    async def until_known(self, blocks: int) -> None:
        await until(
            lambda: self.kv().known and self.kv().resident_blocks == blocks, f"{blocks} blocks"
        )


@asynccontextmanager
async def engine_with_events() -> AsyncIterator[Engine]:
    """Yield an idle engine with KV events, four of whose blocks the router knows."""
    context = zmq.asyncio.Context()
    config = Config(
        intervals=Intervals(load_report_s=0.05, health_s=HEALTH_S),
        timeouts=TimeoutSettings(probe_s=1.0),
    )
    async with publisher(context) as events, aiohttp.ClientSession() as http:
        source = {"endpoint": events.live, "replay_endpoint": events.replay, "topic": ""}
        pages = {**VLLM, "/health": "ok", "/metrics": IDLE, "/kv_event_sources": {"0": source}}
        pages["/is_paused"] = {"is_paused": False}
        router = Router(config, http)

        def kv() -> KvState:
            worker = router.dispatcher.core.workers.get(member.worker_id)
            assert worker is not None
            return worker.kv

        async with engine(pages) as url:
            try:
                member = router.fleet.add(parse_worker_spec(url))
                one = Engine(pages, events, member, kv)
                await until(lambda: member.ready, "it to be ready")
                await events.until_subscribed()
                for n in range(4):
                    await one.step(*store_events(n))
                await one.until_known(4)
                yield one
            finally:
                await router.aclose()
    context.destroy(linger=0)


async def test_an_engine_that_slept_wakes_with_an_empty_cache() -> None:
    async with engine_with_events() as one:
        one.pages["/metrics"] = IDLE + SLEEP % "weights_offloaded"
        await until(lambda: not one.member.ready, "it to sleep")
        assert one.kv().resident_blocks == 0
        one.pages["/metrics"] = IDLE + SLEEP % "awake"
        await until(lambda: one.member.ready, "it to wake")
        await one.until_known(0)  # though the replay tells of four blocks, and of no clear
        await one.step(CLEARED, *store_events(5))
        await one.until_known(1)
        assert one.kv().counters.restarts == 0


async def test_an_engine_that_replaced_a_sleeping_one_has_its_own_cache() -> None:
    async with engine_with_events() as one:
        one.pages["/metrics"] = IDLE + SLEEP % "weights_offloaded"
        await until(lambda: not one.member.ready, "it to sleep")
        one.events.kept = {n: pack(*store_events(10 + n)) for n in range(6)}
        one.pages["/metrics"] = IDLE + SLEEP % "awake"
        await one.until_known(6)


@pytest.mark.parametrize("cleared", [True, False], ids=["cleared", "kept"])
async def test_the_cache_of_a_paused_engine_counts_as_possibly_empty(cleared: bool) -> None:
    """The cache of an engine that was paused counts as possibly empty: POST /pause empties it by
    default, and nobody can see whether it did.
    """
    async with engine_with_events() as one:
        one.pages["/is_paused"] = {"is_paused": True}
        await until(lambda: not one.member.ready, "it to be paused")
        one.pages["/is_paused"] = {"is_paused": False}
        await until(lambda: one.member.ready, "it to be resumed")
        await until(lambda: one.kv().settled, "its stream to go on")
        assert (one.kv().known, one.kv().resident_blocks) == (False, 0)
        await one.step(*([CLEARED] if cleared else []), *store_events(5))
        await until(lambda: one.kv().resident_blocks == 1, "what it stored since")
        assert one.kv().known is cleared


async def test_a_cache_reset_of_an_idle_engine_is_seen_by_its_reset_counter() -> None:
    async with engine_with_events() as one:
        one.pages["/metrics"] = IDLE + RESET % 3  # it was not counted before
        await until(lambda: one.kv().resident_blocks == 0, "the reset to be seen")
        assert not one.kv().known  # it may have refused, which its events will show
        await one.step(CLEARED, *store_events(5))
        await one.until_known(1)
        await until_reported(one, IDLE + RESET % 3)
        assert (one.kv().known, one.kv().resident_blocks) == (True, 1)


async def until_reported(one: Engine, metrics: str) -> None:
    """Wait until the router has read this metrics page for three load reports."""
    pages: list[str] = []

    async def page() -> str:
        pages.append(metrics)
        return metrics

    one.pages["/metrics"] = page
    await until(lambda: len(pages) > 3, "load reports")


async def test_a_cache_reset_of_a_busy_engine_is_left_to_its_next_events() -> None:
    busy = METRICS.replace('"32"', '"2"')
    async with engine_with_events() as one:
        await until_reported(one, busy)
        await until_reported(one, busy + RESET % 1)
        assert (one.kv().known, one.kv().resident_blocks) == (True, 4)


LORA = (
    'vllm:lora_requests_info{max_lora="4",running_lora_adapters="%s",'
    'waiting_lora_adapters="%s"} %d\n'
)


def listing(*adapters: str) -> dict[str, Any]:
    """Return a page of models: the base model and these adapters."""
    (base,) = MODELS["data"]
    return {"data": [base, *({"id": name, "parent": base["id"]} for name in adapters)]}


async def test_adapters_loaded_while_an_engine_serves_are_noticed(monkeypatch) -> None:
    """Adapters that are loaded while an engine serves are learned at once if an unknown one is in
    use; otherwise, and when one is unloaded, a little later.
    """
    pages = {**VLLM, "/health": "ok", "/metrics": METRICS + LORA % ("", "", 1)}
    asked: list[str] = []

    def served(member: Member) -> tuple[str, ...]:
        assert member.recognized is not None
        return member.recognized.facts.models[1:]

    async with ready_worker(pages, asked) as member:
        known, began = member.recognized, asked.count("/v1/models")
        pages["/v1/models"] = listing("tone", "style")
        pages["/metrics"] = METRICS + LORA % ("", "", 1) + LORA % ("tone", "tone,style", 2)
        await until(lambda: served(member) == ("tone", "style"), "the adapters to be known")
        assert member.recognized.facts.adapters == {"tone", "style"}  # type: ignore[union-attr]
        assert member.ready
        assert known is not None
        assert asked.count("/v1/models") == began + 1
        pages["/metrics"] = METRICS + LORA % ("ghost", "", 3)  # in use, and not listed
        await until(lambda: asked.count("/metrics") > 20, "figures to be read")
        assert asked.count("/v1/models") == began + 1
    monkeypatch.setattr("router.fleet.member._ADAPTERS_S", 0.05)
    pages["/metrics"] = METRICS + LORA % ("", "", 4)
    async with ready_worker(pages, asked) as member:
        assert served(member) == ("tone", "style")
        pages["/v1/models"] = listing("style")
        await until(lambda: served(member) == ("style",), "one to be unloaded")
        pages["/v1/models"] = 500
        began = asked.count("/v1/models")
        await until(lambda: asked.count("/v1/models") > began + 2, "it to be asked again")
        assert served(member) == ("style",)
        assert member.ready


async def test_an_engine_without_adapters_is_not_polled_for_them(monkeypatch) -> None:
    monkeypatch.setattr("router.fleet.member._ADAPTERS_S", 0.01)
    asked: list[str] = []
    async with ready_worker({**VLLM, "/health": "ok"}, asked):
        began = asked.count("/v1/models")
        await until(lambda: asked.count("/metrics") > 20, "figures to be read")
        assert asked.count("/v1/models") == began


async def test_invalid_load_values_are_logged_once_until_they_are_valid(
    caplog: pytest.LogCaptureFixture,
) -> None:
    named = "its load figures are of no use: KV usage is 7.5"
    async with engine_with_events() as one:
        for times in (1, 2):
            await until_reported(one, METRICS.replace("0.5", "7.5"))
            assert caplog.text.count(named) == times
            assert one.member.ready
            await until_reported(one, METRICS)


async def test_a_400_from_triton_means_not_ready() -> None:
    pages = {**TRITON, "/v2/health/ready": "", "/health": "fine"}
    async with ready_worker(pages, []) as member:
        pages["/v2/health/ready"] = 400
        await until(lambda: "not ready: GET /v2/health/ready" in member.trouble, "it to be down")
        assert not member.ready
        pages["/v2/health/ready"] = "ok"
        await until(lambda: member.ready, "it to be ready again")


async def test_advice_is_given_once(caplog: pytest.LogCaptureFixture) -> None:
    pages = {**SGLANG, "/health": "ok", "/server_info": {**SGLANG["/server_info"], "page_size": 1}}
    async with ready_worker(pages, []) as member:
        pages["/v1/models"] = pages["/health"] = 503
        await until(lambda: "/v1/models answered 503" in member.trouble, "it to be down")
        pages["/v1/models"], pages["/health"] = SGLANG["/v1/models"], "ok"
        await until(lambda: member.ready, "it to be back")
        assert caplog.text.count("give it --page-size 16 or more") == 1


async def test_triton_reports_its_block_size_after_its_first_request() -> None:
    pages = {**TRITON, "/metrics": FRESH_BACKEND}
    async with ready_worker(pages, []) as member:
        assert member.recognized is not None
        assert not member.recognized.sized
        pages["/metrics"] = BACKEND
        await until(lambda: member.recognized.sized, "it to be asked again")
        assert member.recognized.facts.block_size == 64
        assert member.recognized.facts.kv_capacity_tokens == 64_000


def adapters(count: int) -> list[dict[str, object]]:
    """Return adapters of `m` as vLLM lists them: in the order in which they were loaded."""
    return [{"id": f"tune-{n}", "parent": "m"} for n in range(count)]


async def test_adapters_beyond_the_limit_are_not_served_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.fleet.member._ADAPTERS_S", 0.05)
    pages = {**VLLM, "/health": "ok", "/metrics": METRICS + LORA % ("", "", 1)}

    def listing(count: int) -> dict[str, object]:
        return {"data": [*adapters(count), *MODELS["data"]]}

    pages["/v1/models"] = listing(3)
    async with ready_worker(pages, [], Limits(models=5)) as member:

        def served() -> tuple[str, ...]:
            assert member.recognized is not None
            return member.recognized.facts.models

        assert served() == ("m", "tune-0", "tune-1", "tune-2")
        assert (member.recognized.refused_models, member.advice.count("limits")) == (0, 0)
        pages["/v1/models"] = listing(7)
        await until(lambda: member.recognized.refused_models == 3, "too many adapters")
        assert served() == ("m", *(f"tune-{n}" for n in range(4)))
        assert member.recognized.facts.adapters == {f"tune-{n}" for n in range(4)}
        assert "3 of its models are not served: raise limits.models" in member.advice
        pages["/v1/models"] = listing(9)
        await until(lambda: member.recognized.refused_models == 5, "more of them")
        assert caplog.text.count("of its models are not served") == 1
        pages["/v1/models"] = {"data": [{"id": str(n)} for n in range(6)]}
        await until(lambda: "more than 5 models" in member.advice, "a list that is none")
        assert served() == ("m", *(f"tune-{n}" for n in range(4)))
        assert caplog.text.count("it keeps its earlier models") == 1
        pages["/v1/models"] = listing(2)
        await until(lambda: len(served()) == 3, "few of them")
        assert "limits.models" not in member.advice
        assert member.ready


async def test_an_engine_with_too_many_adapters_is_recognized() -> None:
    pages = {**VLLM, "/v1/models": {"data": [*MODELS["data"], *adapters(1_500)]}}
    one = await recognized(pages)
    assert (len(one.facts.models), one.refused_models) == (1_024, 477)
    assert one.facts.models[:2] == ("m", "tune-0")
    named = await recognized(pages, ",model=tune-1499")
    assert (named.facts.models, named.refused_models) == (("tune-1499",), 0)
