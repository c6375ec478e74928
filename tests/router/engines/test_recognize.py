"""Tests of the recognition of engines: real HTTP servers that answer as engines do, or
with faults.
"""

from __future__ import annotations

import asyncio
import math

import aiohttp
import pytest

from engine.wire.events import WireError
from policies.facts import WorkerFacts
from router.engines.adapter import (
    MAX_METRICS_BYTES,
    MAX_REPLY_BYTES,
    LoadReader,
    UnrecognizedError,
    trouble_with,
)
from router.engines.spec import WorkerSpecError
from router.engines.vllm import loads_in
from router.events.sources import PollSource, ZmqSource
from router.fleet.recognize import NoSuchRankError, Recognized
from tests.router.core.core_world import World
from tests.router.engines.engine_pages import (
    CUT,
    HANGS,
    MODELS,
    Pages,
    engine,
    loads_of,
    recognized,
)
from tests.router.vllm_pages import METRICS, SOURCES, VLLM


async def test_a_vllm_without_event_sources_is_served_without_events() -> None:
    one = await recognized(VLLM)
    assert (one.kind, one.source, one.ranks, one.address) == ("vllm", None, (0,), None)
    assert one.loads is not None
    assert one.loads.loads_in is loads_in
    assert "--kv-events-config" in one.advice
    facts = one.facts
    assert (facts.models, facts.block_size, facts.has_events) == (("m",), 64, False)
    assert (facts.kv_capacity_tokens, facts.max_model_tokens) == (32_000, 8192)


async def test_a_vllm_with_event_sources_or_an_events_option_gets_no_advice() -> None:
    assert (await recognized({**VLLM, "/kv_event_sources": SOURCES})).advice == ""
    for option in (",events=none", ",events=tcp://127.0.0.1:5557"):
        assert (await recognized(VLLM, option)).advice == ""


async def test_the_model_path_of_a_vllm_is_read_from_its_model_list() -> None:
    cards = [
        {"id": "adapter", "root": "/adapters/one", "parent": "m"},
        {"id": "m", "root": "org/model", "owned_by": "vllm"},
    ]
    one = await recognized({**VLLM, "/v1/models": {"data": cards}})
    assert one.model_path == "org/model"
    cards[1] = {"id": "m", "owned_by": "vllm"}
    assert (await recognized({**VLLM, "/v1/models": {"data": cards}})).model_path is None


async def test_a_vllm_is_not_used_for_a_model_that_it_does_not_list() -> None:
    """A vLLM gets no request for a model that it does not list, since it would answer 404; other
    servers may know more names than they list.
    """
    assert (await recognized(VLLM, ",model=m")).facts.models == ("m",)
    with pytest.raises(UnrecognizedError, match="it serves no model 'x', but 'm'"):
        await recognized(VLLM, ",model=x")
    assert (await recognized({"/v1/models": MODELS}, ",model=x")).facts.models == ("x",)


async def test_approximated_caches_use_larger_blocks() -> None:
    plain = {"/v1/models": MODELS}
    sizes = {None: 64, 16: 16, 64: 64, 4096: 4096}  # an operator's word counts
    for given, size in sizes.items():
        option = "" if given is None else f",block_size={given}"
        assert (await recognized(plain, option)).facts.block_size == size
    for told, size in {1: 64, 24: 72, 32: 64, 65: 65, 128: 128}.items():
        pages = {**VLLM, "/metrics": VLLM["/metrics"].replace('size="32"', f'size="{told}"')}
        assert (await recognized(pages)).facts.block_size == size
        named = {**pages, "/kv_event_sources": SOURCES}
        assert (await recognized(named)).facts.block_size == told


async def test_a_configured_block_size_that_differs_from_the_engines_is_reported() -> None:
    """A reported block size that differs from the real one is shown, because the worker's events
    could not be used.
    """
    assert "was given, but it reports 32" in (await recognized(VLLM, ",block_size=16")).advice
    sized = await recognized({**VLLM, "/kv_event_sources": SOURCES}, ",block_size=32")
    assert sized.advice == ""
    assert (await recognized({"/v1/models": MODELS}, ",block_size=64")).advice == ""


async def test_wildcard_event_endpoints_use_the_workers_host() -> None:
    one = await recognized({**VLLM, "/kv_event_sources": SOURCES})
    assert isinstance(one.source, ZmqSource)
    assert one.source.live == "tcp://127.0.0.1:5557"
    assert one.source.replay == "tcp://127.0.0.1:5558"
    assert (one.source.topic, one.source.snapshot) == ("kv", None)
    assert one.facts.has_events


async def test_an_engine_without_vllms_metrics_is_served_without_load_reports() -> None:
    for metrics in ("other:load 2\n", 404, "", "vllm:num_requests_running nonsense\n"):
        one = await recognized({"/v1/models": MODELS, "/metrics": metrics})
        assert (one.kind, one.loads, one.facts.block_size) == ("openai", None, 64)
        assert math.isnan(one.facts.kv_capacity_tokens)


async def test_a_server_that_only_renders_prompts_is_refused_as_such() -> None:
    """A server that only renders prompts is named as such, by the answers of `vllm launch render`
    0.32; vLLM's servers of embeddings render nothing.
    """
    models = {"data": [{"id": "m", "owned_by": "vllm"}]}
    pages: Pages = {"/v1/models": models, "/metrics": "up 1\n", "/version": {"version": "0.32.0"}}
    renders = {"/v1/chat/completions/render": 405, "/v1/completions/render": 405}
    for options in ("", ",kind=vllm"):
        with pytest.raises(UnrecognizedError, match="it is a renderer, not a worker"):
            await recognized({**pages, **renders}, options)
    assert (await recognized(pages)).kind == "openai"
    completes = {"/v1/completions": 405}
    assert (await recognized({**pages, **renders, **completes})).kind == "openai"
    assert (await recognized({**VLLM, **renders})).kind == "vllm"
    others = {**pages, **renders, "/v1/models": MODELS}
    assert (await recognized(others)).kind == "openai"


async def test_a_warmroute_engine_has_a_snapshot() -> None:
    models = {"data": [{"id": "m", "owned_by": "warmroute"}]}
    pages = {**VLLM, "/v1/models": models, "/kv_event_sources": SOURCES}
    one = await recognized(pages)
    assert one.kind == "warmroute"
    assert isinstance(one.source, ZmqSource)
    assert str(one.source.snapshot).endswith("/kv_snapshot")


async def test_warmroute_engines_that_can_read_each_others_kv_form_a_group() -> None:
    """Our own engines that can read each other's KV form a group: they have one version and store
    one model alike. A worker without a role could take one.
    """
    models = {"data": [{"id": "m", "owned_by": "warmroute"}]}
    ours = {**VLLM, "/v1/models": models, "/version": {"version": "0.1"}}
    told = {**ours, "/server_info": {"role": "both", "group": "abc"}}
    one, other = await recognized(told, ",role=prefill"), await recognized(told, ",role=decode")
    assert one.facts.group == other.facts.group == "warmroute 0.1 abc"
    idle = await recognized(told)
    assert (idle.facts.group, idle.own_group) == (None, one.facts.group)
    for info in ({"group": None}, {"group": 3}, [], 404, "nonsense"):
        lone = await recognized({**ours, "/server_info": info}, ",role=decode")
        assert lone.facts.group is None


async def test_adapters_are_distinguished_from_base_models_and_aliases() -> None:
    cards = [{"id": "m"}, {"id": "alias"}, {"id": "tuned", "parent": "m"}]
    one = await recognized({**VLLM, "/v1/models": {"data": cards}})
    assert one.facts.models == ("m", "alias", "tuned")
    assert one.facts.adapters == {"tuned"}
    world = World(workers=0)
    world.join(0, models=one.facts.models, adapters=one.facts.adapters)
    asked = ("m", "alias", "tuned", "unknown")
    assert [world.core.workers.identity(model) for model in asked] == [
        ("m", None),
        ("m", None),
        ("m", "tuned"),
        ("unknown", None),
    ]


async def test_configured_options_override_the_engines_values() -> None:
    options = (
        ",kind=vllm,model=only,block_size=64,events=bind:tcp://h:1,replay=tcp://h:2,topic=kv"
        ",role=decode,kv_tokens=5000,max_requests=7,max_queued_tokens=9000"
        ",max_kv_fraction=0.9,weight=2"
    )
    models = {"data": [*MODELS["data"], {"id": "only"}]}
    pages = {**VLLM, "/v1/models": models, "/kv_event_sources": SOURCES}
    one = await recognized(pages, options)
    facts = one.facts
    assert one.source == ZmqSource("tcp://h:1", "tcp://h:2", topic="kv", bind=True)
    assert (facts.models, facts.block_size, facts.role) == (("only",), 64, "decode")
    assert facts.kv_capacity_tokens == 5000
    assert (facts.max_requests, facts.max_queued_tokens) == (7, 9000)
    assert (facts.max_kv_fraction, facts.weight) == (0.9, 2)
    without = await recognized({**VLLM, "/kv_event_sources": SOURCES}, ",events=none")
    assert without.source is None


@pytest.mark.parametrize(
    ("pages", "says"),
    [
        ({"/v1/models": 500}, "answered 500"),
        ({"/v1/models": 302}, "answered 302"),  # nobody sends us elsewhere
        ({"/v1/models": "<html>"}, "not a list of models"),
        ({"/v1/models": {"data": []}}, "lists no model"),
        ({"/v1/models": {"data": [{"id": 5}]}}, "not a list of models"),
        ({"/v1/models": {"data": [{"id": str(n)} for n in range(1025)]}}, "more than 1024"),
        ({"/v1/models": b" " * (MAX_REPLY_BYTES + 1)}, "more than"),
        ({"/v1/models": b'{"data":' + b"[" * 100_000}, "not a list of models"),
        ({**VLLM, "/kv_event_sources": "[]"}, "kv_event_sources"),
        ({**VLLM, "/metrics": METRICS.replace('"32"', '"99999"')}, "99999 tokens"),
        ({**VLLM, "/metrics": METRICS.replace('"1000"', '"1' + "0" * 11 + '"')}, "room for 3200"),
        ({"/v1/models": {"data": [{"id": "m", "max_model_len": -1}]}}, "max_model_len"),
    ],
)
async def test_an_invalid_page_is_refused_with_the_reason(pages: Pages, says: str) -> None:
    with pytest.raises((UnrecognizedError, WireError), match=says):
        await recognized(pages)


@pytest.mark.parametrize(
    "endpoint",
    ["", "x", "inproc://a", "tcp://h", "tcp://h:0", "tcp://h:99999", "pgm://h:1", "tcp://a b:1"],
)
async def test_an_engine_with_an_unusable_event_endpoint_is_served_without_events(
    endpoint: str,
) -> None:
    sources = {"0": {"endpoint": endpoint, "replay_endpoint": None}}
    one = await recognized({**VLLM, "/kv_event_sources": sources})
    assert one.source is None
    assert not one.facts.has_events
    with pytest.raises(WorkerSpecError, match="events is"):
        await recognized(VLLM, f",events={endpoint}")


@pytest.mark.parametrize(
    "metrics",
    [
        b"#" * (MAX_METRICS_BYTES + 1),
        METRICS.replace("2.0", "1e308") + "vllm:num_requests_running 1e308\n",
        METRICS.replace("2.0", "NaN"),
        METRICS.replace("2.0", "-1"),
        b"\xff\x00",
    ],
    ids=["long", "overflow", "nan", "negative", "binary"],
)
async def test_hostile_metrics_raise_only_wire_errors(metrics: str | bytes) -> None:
    async with engine({"/metrics": metrics}) as url, aiohttp.ClientSession() as http:
        with pytest.raises(WireError):
            await LoadReader(f"{url}/metrics", loads_in).read(http, aiohttp.ClientTimeout(total=5))


async def test_all_fields_of_a_load_report_are_read() -> None:
    (load,) = (await loads_of(VLLM)).values()
    assert (load.running, load.waiting, load.kv_usage, load.kv_used_tokens) == (2, 1, 0.5, 16_000)


RANKS = METRICS + METRICS.replace('engine="0"', 'engine="1"').replace(" 2.0", " 5.0")


async def test_a_rank_has_its_own_events_load_and_capacity() -> None:
    sources = SOURCES | {"1": {"endpoint": "tcp://*:5557", "topic": "other"}}
    pages = {"/v1/models": MODELS, "/metrics": RANKS, "/kv_event_sources": sources}
    both = await recognized(pages)
    assert (both.ranks, both.address, both.source) == ((0, 1), None, None)
    assert both.facts.kv_capacity_tokens == 64_000
    one = await recognized(pages, ",rank=1")
    assert (one.ranks, one.address) == ((0, 1), 1)
    assert one.source == ZmqSource("tcp://127.0.0.1:5557", topic="other")
    assert one.facts.kv_capacity_tokens == 32_000
    assert one.facts.name.endswith("#1")
    assert {rank: load.running for rank, load in (await loads_of(pages)).items()} == {0: 2, 1: 5}
    with pytest.raises(NoSuchRankError, match="no rank 7; its ranks: 0, 1"):
        await recognized(pages, ",rank=7")


async def test_ranks_that_do_not_begin_at_zero_are_addressed_by_position() -> None:
    """Data-parallel ranks that do not begin at zero are addressed by their place: in vLLM with
    hybrid balancing, this server has the ranks 2 and 3 of four.
    """
    metrics = RANKS.replace('engine="0"', 'engine="2"').replace('engine="1"', 'engine="3"')
    pages = {"/v1/models": MODELS, "/metrics": metrics}
    assert (await recognized(pages)).ranks == (2, 3)
    assert (await recognized(pages, ",rank=3")).address == 1


async def test_the_single_rank_of_an_external_balancer_is_an_ordinary_worker() -> None:
    sources = {"3": {"endpoint": "tcp://*:5560"}}
    metrics = METRICS.replace('engine="0"', 'engine="3"')
    pages = {"/v1/models": MODELS, "/metrics": metrics, "/kv_event_sources": sources}
    one = await recognized(pages)
    assert (one.ranks, one.address) == ((3,), None)
    assert one.source == ZmqSource("tcp://127.0.0.1:5560")
    assert one.facts.kv_capacity_tokens == 32_000


async def test_a_sleeping_engine_is_not_recognized() -> None:
    state = 'vllm:engine_sleep_state{engine="0",sleep_state="%s"} %d\n'
    awake = METRICS + state % ("awake", 1) + state % ("discard_all", 0)
    asleep = METRICS + state % ("awake", 0) + state % ("weights_offloaded", 1)
    assert (await recognized({**VLLM, "/metrics": awake})).kind == "vllm"
    with pytest.raises(UnrecognizedError, match="sleeps"):
        await recognized({**VLLM, "/metrics": asleep})


async def test_events_are_polled_if_configured() -> None:
    one = await recognized(VLLM, ",kind=openai,events=poll")
    assert isinstance(one.source, PollSource)
    assert one.source.url.endswith("/kv_cache_events")


@pytest.mark.parametrize("page", [HANGS, CUT], ids=["hangs", "cut"])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/kv_event_sources"])
async def test_missing_or_endless_answers_time_out(path: str, page: object) -> None:
    pages = {**VLLM, "/kv_event_sources": SOURCES, path: page}
    with pytest.raises((TimeoutError, aiohttp.ClientError)):
        await recognized(pages, timeout_s=0.2 if page is HANGS else 5.0)


async def test_errors_distinguish_another_protocol_from_a_closed_port() -> None:
    async def speaks_grpc(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\0\0\0\4\0\0\0\0\0")  # settings, whoever asks
        await reader.read(1)
        writer.close()

    async def speaks_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    async def trouble(url: str) -> str:
        async with aiohttp.ClientSession() as http:
            with pytest.raises(aiohttp.ClientError) as caught:
                await http.get(url)
        return await trouble_with(url, caught.value, 1.0)

    for speaks, scheme, says in (
        (speaks_grpc, "http", "speaks gRPC, or HTTP/2 alone; give its HTTP port"),
        (speaks_grpc, "https", "the TLS handshake fails"),
        (speaks_http, "https", "the TLS handshake fails"),
        (speaks_http, "http", "is it an HTTP server?"),
    ):
        async with await asyncio.start_server(speaks, "127.0.0.1") as server:
            port = server.sockets[0].getsockname()[1]
            text = await trouble(f"{scheme}://127.0.0.1:{port}/")
            assert says in text
            assert "Operation not permitted" not in text  # the number 1 of TLS errors is no errno
    assert "127.0.0.1:1: cannot connect (Connection refused)" in await trouble(
        "http://127.0.0.1:1/v2"
    )


def test_a_worker_is_logged_on_one_line_whatever_its_model_names():
    names = ("tiny", "bad\nname", *(f"adapter-{n}" for n in range(9)))
    facts = WorkerFacts(name="w", models=names, block_size=16, has_events=False)
    assert str(Recognized("vllm", facts, None)) == (
        "kind vllm, models tiny bad\\nname adapter-0 adapter-1 adapter-2 6 more, "
        "block size 16, KV tokens unknown, events no"
    )
