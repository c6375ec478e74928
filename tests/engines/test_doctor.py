"""Tests of the doctor on a real tritonserver: each cause is created, reported first, and cured.

A server holds only the models of the current case. A pool is two servers. Docstrings give the
causes' numbers in `warmroute doctor --causes`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from router.doctor.examine import Options, examine
from router.doctor.probe import ProbeLimits
from router.doctor.report import DoctorReport, Finding
from simulator import CHECKOUT
from simulator.capacity.batches import fit, read_measured
from tests.engines.doctors_triton import (
    WATCH_S,
    Body,
    DoctorsTriton,
    Model,
    config_of,
    loaded,
    numbers,
    plain,
    tensor,
)
from tests.engines.triton_asked import gauges_of
from tests.live.stack import until
from tests.router.engines.engine_pages import engine as mock

pytestmark = pytest.mark.asyncio(loop_scope="session")

FULL = pytest.mark.full  # `make test` examines readings of each cause (tests/router/doctor)
SERIAL = itertools.count(1)


TEXTS = tensor("text_input", "STRING", "1")
LONGEST = tensor("max_tokens", "INT32", "1", "optional: true")
DECOUPLED = "model_transaction_policy { decoupled: true }"


def texts(
    name: str,
    kind: str,
    extra: str = "",
    output: str = "text_output",
    count: int = 1,
    **more: Any,
) -> Model:
    """Return a Triton model whose input and output are texts."""
    inputs = f"{TEXTS}, {LONGEST}" if kind == "engine" else TEXTS
    settings = {"kind": kind, **more}
    outputs = tensor(output, "STRING", "1")
    return Model(name, config_of(inputs, outputs, extra, 0, count, settings))


def llm(**more: Any) -> Model:
    """Return a model that stands in for TensorRT-LLM."""
    return texts("tensorrt_llm", "engine", DECOUPLED, **more)


def ensemble(*steps: str) -> Model:
    """Return an ensemble whose steps pass the text on."""
    told, source = [], "text_input"
    for step in steps:
        last = step == steps[-1]
        sink = "text_output" if last else "QUERY"
        longest = 'input_map { key: "max_tokens" value: "max_tokens" }' if last else ""
        told.append(
            f'{{ model_name: "{step}" model_version: -1 '
            f'input_map {{ key: "text_input" value: "{source}" }} {longest} '
            f'output_map {{ key: "{sink}" value: "{sink}" }} }}'
        )
        source = sink
    inputs = f"{TEXTS}, {tensor('max_tokens', 'INT32', '1')}"
    config = (
        f'platform: "ensemble"\nmax_batch_size: 0\ninput [ {inputs} ]\n'
        f"output [ {tensor('text_output', 'STRING', '1')} ]\n"
        f"ensemble_scheduling {{ step [ {', '.join(told)} ] }}\n"
    )
    return Model("ensemble", config)


def flat() -> Body:
    """Return a request for a model without a batch dimension."""
    body = numbers()
    body["inputs"][0]["shape"] = [4]
    return body


def text_request(words: int = 20, longest: int = 20) -> list[Body]:
    """Return a list with one request for a text model."""
    return [{"text_input": "word " * words, "max_tokens": longest}]


def first(report: DoctorReport, number: int) -> Finding:
    """Return the report's first finding, and check that its cause has this number."""
    assert [one.number for one in report.findings][:1] == [number], report.text()
    return report.findings[0]


async def command(*arguments: str) -> tuple[int, str]:
    """Run `warmroute` with these arguments; return (exit status, output)."""
    program = [sys.executable, "-m", "router", *arguments, "--seconds", f"{WATCH_S}", "--quiet"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*program, cwd=CHECKOUT, stdout=pipe)
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


async def watched(*servers: DoctorsTriton, **options: Any) -> DoctorReport:
    """Run the doctor on these servers and return its report."""
    return await examine([one.target for one in servers], Options(WATCH_S, **options))


async def test_the_doctor_finds_a_missing_dynamic_batcher(servers: list[DoctorsTriton]) -> None:
    """The doctor finds cause 1 (the dynamic batcher is not on), and nothing after the cure."""
    server = servers[0]
    await server.load(plain(extra=""))
    async with loaded(server, 16):
        found = first(await watched(server), 1)
    assert "mean batch 1 of 8" in found.found.evidence
    await server.load(plain())
    async with loaded(server, 16):
        assert (await watched(server)).findings == ()
    await server.load(plain(extra=""))  # its clients' last requests have ended
    report = await watched(server)
    assert (report.findings, report.evidence.loaded) == ((), False)


@FULL
async def test_the_doctor_finds_a_max_batch_size_of_zero(servers: list[DoctorsTriton]) -> None:
    """The doctor finds cause 2 (`max_batch_size` is 0), and nothing after the cure."""
    await servers[0].load(plain(batch=0))
    async with loaded(servers[0], 8, [flat()]):
        assert first(await watched(servers[0]), 2).found.changes[0].now == "0"
    await servers[0].load(plain())
    async with loaded(servers[0], 8):
        assert (await watched(servers[0])).findings == ()


@pytest.mark.parametrize("what", ["shapes", pytest.param("inputs", marks=FULL)])
async def test_the_doctor_finds_requests_that_cannot_share_a_batch(
    servers: list[DoctorsTriton], what: str, tmp_path: Path
) -> None:
    """The doctor finds causes 3 (requests of four different shapes) and 4 (requests with two sets
    of inputs), and neither if all requests are equal.
    """
    bodies = (
        [numbers(length) for length in (4, 5, 6, 7)]
        if what == "shapes"
        else [numbers(), numbers(more=True)]
    )
    optional = ", " + tensor("MORE", "FP32", "4", "optional: true") if what == "inputs" else ""
    server = servers[0]
    await server.load(plain(dims="-1" if what == "shapes" else "4", more=optional))
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(map(json.dumps, bodies)))
    async with loaded(server, 16, bodies):
        found = first(await watched(server, requests=file), 3 if what == "shapes" else 4)
    assert ("4 shapes" if what == "shapes" else "2 sets") in found.found.evidence
    async with loaded(server, 16, bodies[:1]):
        assert (await watched(server)).findings == ()


@FULL
async def test_the_doctor_finds_idle_instances_that_take_single_requests(
    servers: list[DoctorsTriton],
) -> None:
    """The doctor finds cause 5 (idle instances take single requests), and nothing after
    the cure.
    """
    server = servers[0]
    await server.load(plain(count=4, base_ms=60))
    async with loaded(server, 4, pause_s=0.002):
        found = first(await watched(server), 5)
    assert (found.found.changes[0].now, found.found.changes[0].to) == ("4", "2")
    await server.load(plain())
    async with loaded(server, 16):
        assert (await watched(server)).findings == ()


@FULL
async def test_the_doctor_finds_a_queue_delay_without_further_requests(
    servers: list[DoctorsTriton],
) -> None:
    """The doctor finds cause 6 (the queue delay waits for no further request), and nothing after
    the cure.
    """
    server = servers[0]
    batcher = "dynamic_batching { max_queue_delay_microseconds: %d }"
    sizes = "preferred_batch_size: [ 4, 8 ] max_queue"
    # If none is configured, Triton reports the largest one as preferred.
    for batching, more in ((batcher, []), (batcher.replace("max_queue", sizes), ["[4, 8]"])):
        await server.load(plain(batching % 100_000))
        async with loaded(server, 1, pause_s=0.05):
            found = first(await watched(server), 6)
        assert "the delay of 100 ms" in found.found.evidence
        assert [change.now for change in found.found.changes] == ["100000", *more]
    await server.load(plain(batcher % 1000))
    async with loaded(server, 16):
        assert (await watched(server)).findings == ()


async def test_the_doctor_finds_a_bounded_queue_that_refuses_requests(
    servers: list[DoctorsTriton],
) -> None:
    """The doctor finds cause 8 (a bounded queue refuses requests) by its own probe, since Triton
    does not count refused requests.
    """
    server = servers[0]
    batcher = "dynamic_batching {{ default_queue_policy {{ max_queue_size: {} }} }}"
    limits = ProbeLimits(requests=600, concurrency=16, seconds=20.0)
    await server.load(plain(batcher.format(2)))
    report = await watched(server, probe=limits)
    assert "max_queue_size is 2" in first(report, 8).found.evidence
    assert report.probe["errors"]["queue_full"] > 0
    await server.load(plain(batcher.format(64)))
    report = await watched(server, probe=limits)
    assert 8 not in [one.number for one in report.findings]
    assert report.probe["failed"] == 0


@FULL
async def test_the_doctor_finds_requests_that_time_out_in_the_queue(
    servers: list[DoctorsTriton],
) -> None:
    """The doctor finds cause 9 (requests time out in the queue), and nothing after the cure."""
    server = servers[0]
    policy = "default_timeout_microseconds: {} allow_timeout_override: false"
    batcher = f"dynamic_batching {{{{ default_queue_policy {{{{ {policy} }}}} }}}}"
    await server.load(plain(batcher.format(25_000), batch=2))
    async with loaded(server, 12):
        report = await watched(server)
    assert "timeout 25 ms" in first(report, 9).found.evidence
    await server.load(plain(batcher.format(0), batch=16))
    async with loaded(server, 12):
        assert (await watched(server)).findings == ()


@FULL
async def test_the_doctor_finds_sequences_that_hold_their_slots(
    servers: list[DoctorsTriton],
) -> None:
    """The doctor finds cause 11 (sequences hold their slots), and nothing after the cure."""
    server = servers[0]
    batching = "sequence_batching { direct { } max_sequence_idle_microseconds: 5000000 }"
    await server.load(plain(batching, batch=2))
    begun = [numbers(sequence_id=next(SERIAL), sequence_start=True) for _ in range(8)]
    async with loaded(server, 8, begun, pause_s=60.0):
        found = first(await watched(server), 11)
    assert "2 slots" in found.found.evidence
    assert found.found.changes[1].now == "5000000"
    await server.load(plain(batching, batch=8))
    whole = [
        numbers(sequence_id=next(SERIAL), sequence_start=True, sequence_end=True)
        for _ in range(4000)
    ]
    async with loaded(server, 4, whole, pause_s=0.01):
        assert (await watched(server)).findings == ()


GENERATE, STREAM = "tensorrt_llm/generate", "ensemble/generate_stream"


@pytest.mark.parametrize(
    ("number", "sick", "well", "longest", "says"),
    [
        (
            13,
            {"kv_tokens": 2560, "max_tokens_in_paged_kv_cache": 2560, "answer": 60},
            {},
            1060,
            "the KV cache holds 2,560 tokens and a request needs 2,060",
        ),
        pytest.param(
            *(14, {"kv_tokens": 16_000}, {}, 4000, "guaranteed_no_evict reserves"), marks=FULL
        ),
        pytest.param(
            *(16, {"batch": 2}, {}, 20, "2 scheduled all the time of at most 2"), marks=FULL
        ),
    ],
)
async def test_the_doctor_distinguishes_three_causes_of_small_engine_batches(
    servers: list[DoctorsTriton],
    number: int,
    sick: dict[str, object],
    well: dict[str, object],
    longest: int,
    says: str,
) -> None:
    """The doctor tells causes 13, 14 and 16 apart, although each leaves eight requests active and
    few of them scheduled.
    """
    server, told = servers[0], {"max_tokens": float(longest)}
    words = 1000 if number == 13 else 20
    await server.load(llm(**sick))
    async with loaded(server, 8, text_request(words, longest), GENERATE):
        report = await watched(server, **told)
    assert says in first(report, number).found.evidence
    before = await gauges_of(server, "max")
    await server.load(llm(kv_tokens=65_536, **well))

    async def its_own() -> bool:
        return await gauges_of(server, "max") > before

    async with loaded(server, 8, text_request(words, longest), GENERATE):
        # Triton shows the gauges of an unloaded model until the new one has its first.
        await until(its_own, "the gauges of the larger cache and batch")
        assert (await watched(server, **told)).findings == ()


@FULL
async def test_the_doctor_finds_an_unfilled_template(servers: list[DoctorsTriton]) -> None:
    """The doctor finds cause 19 (settings of a template that nobody filled in), and nothing after
    the cure.
    """
    server = servers[0]
    for policy, numbers_found in (("${batch_scheduler_policy}", [19]), ("max_utilization", [])):
        await server.load(llm(batch_scheduler_policy=policy))
        async with loaded(server, 8, text_request(), GENERATE):
            report = await watched(server)
        assert [one.number for one in report.findings] == numbers_found, report.text()


@FULL
async def test_the_doctor_finds_a_bls_model_that_runs_one_request_at_a_time(
    servers: list[DoctorsTriton],
) -> None:
    """The doctor finds cause 26 (a BLS model runs one request per instance), and nothing after the
    cure.
    """
    server = servers[0]
    path = "tensorrt_llm_bls/generate"
    await server.load(llm(), texts("tensorrt_llm_bls", "bls"))
    async with loaded(server, 8, text_request(), path):
        found = first(await watched(server), 26)
    change = found.found.changes[0]
    assert (change.name, change.now, change.to) == (
        "tensorrt_llm_bls: instance_group.count",
        "1",
        "64",
    )
    await server.load(llm(), texts("tensorrt_llm_bls", "bls", count=4))
    async with loaded(server, 4, text_request(), path):
        assert (await watched(server)).findings == ()


@FULL
async def test_the_doctor_finds_a_model_that_waits_for_another_model(
    servers: list[DoctorsTriton],
) -> None:
    """The doctor finds cause 26 for a model that waits for another one which batches; it reports
    neither full batches (36) nor clients that ask one at a time (35).
    """
    server, whole = servers[0], numbers()
    whole["inputs"][0] |= {"shape": [8, 4], "data": [0.5] * 32}
    inner, wrapper = plain(name="inner", base_ms=5), plain(kind="bls", asks="inner")
    await server.load(inner, wrapper)
    async with loaded(server, 24):
        report = await watched(server)
    assert not {35, 36} & {one.number for one in report.findings}, report.text()
    change = first(report, 26).found.changes[0]
    assert (change.name, change.now, change.to) == ("m: instance_group.count", "1", "8")
    await server.load(inner, plain(kind="bls", asks="inner", count=8))
    async with loaded(server, 4):
        report = await watched(server)
    assert 26 not in [one.number for one in report.findings], report.text()
    await server.load(plain(name="inner", per_ms=2), wrapper)
    async with loaded(server, 6, [whole]):
        report = await watched(server)
    assert not [one for one in report.findings if one.where.endswith(" m")], report.text()


async def test_the_doctor_finds_a_slow_ensemble_step(servers: list[DoctorsTriton]) -> None:
    """The doctor finds cause 28 (a step of the ensemble is too slow), and nothing after
    the cure.
    """
    server, path = servers[0], STREAM
    whole = ensemble("preprocessing", "tensorrt_llm")
    for base_ms, found_numbers in ((40, [28]), (1, [])):
        before = texts("preprocessing", "batch", output="QUERY", base_ms=base_ms)
        await server.load(llm(), before, whole)
        async with loaded(server, 8, text_request(), path):
            report = await watched(server)
        assert [one.number for one in report.findings] == found_numbers, report.text()
        if found_numbers:
            assert "at preprocessing" in report.findings[0].found.evidence


def router_page(url: str, requests: int) -> str:
    """Return the metrics page of a router with one worker."""
    return (
        f'warmroute_worker_info{{worker="0",url="{url}",engine="triton",role="both"}} 1\n'
        f'warmroute_worker_requests{{worker="0"}} {requests}\n'
        f"warmroute_server_connections {requests}\nwarmroute_inflight_requests {requests}\n"
    )


@FULL
async def test_the_doctor_finds_abandoned_requests_that_keep_running(
    servers: list[DoctorsTriton],
) -> None:
    """The doctor finds cause 31: clients have left, and their requests keep running."""
    server = servers[0]
    await server.load(llm(answer=1200, kv_tokens=400_000), ensemble("tensorrt_llm"))
    async with (
        loaded(server, 6, text_request(longest=4000), STREAM, warm=False),
        mock({"/metrics": router_page(server.url, 6)}) as router,
    ):
        report = await watched(server, router=router)
        assert report.findings == (), report.text()
    async with mock({"/metrics": router_page(server.url, 0)}) as router:
        found = first(await watched(server, router=router), 31)
    assert "6 or more active at tensorrt_llm" in found.found.evidence
    await server.load()


@FULL
async def test_the_doctor_finds_a_decoupled_model_without_a_limit(
    servers: list[DoctorsTriton],
) -> None:
    """The doctor finds cause 32: nothing limits a decoupled model, so twice as many requests take
    twice the time.
    """
    server = servers[0]
    limits = ProbeLimits(requests=400, concurrency=8, seconds=30.0)
    await server.load(texts("crowd", "crowd", DECOUPLED, base_ms=10))
    report = await watched(server, probe=limits)
    assert "8 requests at once take" in first(report, 32).found.evidence
    await server.load(llm())
    report = await watched(server, probe=limits)
    assert 32 not in [one.number for one in report.findings]


@FULL
async def test_the_doctor_finds_a_rate_limiter_that_holds_requests(
    servers: list[DoctorsTriton],
) -> None:
    """The doctor finds cause 10: each of four instances needs a resource of which the rate limiter
    has only one.
    """
    server = servers[0]
    limited = plain("", batch=0, count=4)
    resources = 'rate_limiter { resources [ { name: "R" count: 1 } ] }'
    for limiter, found_numbers in ((resources, [10]), ("", [])):
        config = limited.config.replace("count: 4 }", f"count: 4 {limiter} }}")
        await server.load(Model("m", config))
        async with loaded(server, 8 if limiter else 4, [flat()]):
            report = await watched(server)
        assert [one.number for one in report.findings] == found_numbers, report.text()


@FULL
async def test_the_doctor_finds_a_python_instance_that_runs_one_request(
    servers: list[DoctorsTriton],
) -> None:
    """The doctor finds cause 29 (a Python instance runs one request at a time), and nothing after
    the cure.
    """
    server = servers[0]
    for count, found_numbers in ((1, [29]), (4, [])):
        await server.load(plain("", batch=0, count=count))
        async with loaded(server, 4, [flat()]):
            report = await watched(server)
        assert [one.number for one in report.findings] == found_numbers, report.text()


async def test_the_doctor_reports_notes_with_exit_status_0(servers: list[DoctorsTriton]) -> None:
    """The doctor reports the notes 7 (little load), 12 (answers from the cache) and 36 (full
    batches of a busy device) with exit status 0, and only under their conditions.
    """
    server, whole = servers[0], numbers()
    whole["inputs"][0] |= {"shape": [4, 4], "data": [0.5] * 16}
    cached = plain("dynamic_batching { } response_cache { enable: true }", count=2)
    others = itertools.cycle([numbers(value=n / 7) for n in range(5000)])
    cases = (
        (7, plain(), (1, [numbers()], 0.2), (16, [numbers()], 0.0)),
        (12, cached, (4, [numbers()], 0.01), (24, others, 0.0)),
        (36, plain(batch=4, base_ms=1, per_ms=8), (4, [whole], 0.0), (3, [numbers()], 0.0)),
    )
    for number, model, sick, well in cases:
        await server.load(model)
        for found_numbers, (clients, bodies, pause_s) in (([number], sick), ([], well)):
            async with loaded(server, clients, bodies, pause_s=pause_s):
                report = await watched(server)
            assert [one.number for one in report.findings] == found_numbers, report.text()
            assert report.status == 0


@FULL
async def test_the_doctor_ignores_gauges_of_an_unloaded_model(servers: list[DoctorsTriton]) -> None:
    """The doctor ignores the gauges of an unloaded model, which Triton still shows: eight requests
    active and one scheduled.
    """
    server = servers[0]
    await server.load(llm(kv_tokens=2560, answer=60))
    async with loaded(server, 8, text_request(1000, 1060), GENERATE):
        first(await watched(server, max_tokens=1060.0), 13)
    await server.load(plain())
    assert await gauges_of(server, "max") > 0
    async with loaded(server, 16):
        assert (await watched(server, max_tokens=1060.0)).findings == ()


@dataclass(frozen=True, slots=True)
class Mixed:
    """A case with two causes: the costlier one, which the doctor must report first, the model that
    has it, and the load.
    """

    numbers: tuple[int, int]
    models: tuple[Model, ...]
    loads: tuple[tuple[str, int, list[Body]], ...]  # path, clients, what they ask
    where: str  # the model at which the first cause is
    options: Mapping[str, Any] = field(default_factory=dict)


STATIC = "static_batch"
TIGHT = {"kv_tokens": 2560, "max_tokens_in_paged_kv_cache": 2560, "answer": 60}
DELAYED = "dynamic_batching { max_queue_delay_microseconds: 60000 }"
MIXED = {
    "memory for one, and a policy that is none": Mixed(
        (13, 19),
        (llm(**TIGHT, batch_scheduler_policy=STATIC),),
        ((GENERATE, 8, text_request(1000, 1060)),),
        "tensorrt_llm",
        {"max_tokens": 1060.0},
    ),
    "a small batch, and an unfilled template": Mixed(
        (16, 19),
        (llm(batch=2, decoding_mode="${decoding_mode}"),),
        ((GENERATE, 8, text_request()),),
        "tensorrt_llm",
        {"max_tokens": 20.0},
    ),
    "two models without the batcher, the busier first": Mixed(
        (1, 1),
        (plain(""), plain("", name="n")),
        (("m/infer", 6, [numbers()]), ("n/infer", 16, [numbers()])),
        "n",
    ),
    "BLS, before an engine whose template is unfilled": Mixed(
        (26, 19),
        (llm(decoding_mode="${decoding_mode}"), texts("tensorrt_llm_bls", "bls")),
        (("tensorrt_llm_bls/generate", 8, text_request()),),
        "tensorrt_llm_bls",
    ),
    "no batch dimension, and a delay for nobody": Mixed(
        (2, 6),
        (plain(batch=0), plain(DELAYED, name="n")),
        (("m/infer", 8, [flat()]), ("n/infer", 1, [numbers()])),
        "m",
    ),
    "no batcher, and one Python process": Mixed(
        (1, 29),
        (plain("", name="n"), plain("", batch=0)),
        (("n/infer", 16, [numbers()]), ("m/infer", 4, [flat()])),
        "n",
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[FULL] if number else []) for number, name in enumerate(MIXED)],
)
async def test_the_costlier_of_two_causes_is_first(servers: list[DoctorsTriton], name: str) -> None:
    server, case = servers[0], MIXED[name]
    await server.load(*case.models)
    async with AsyncExitStack() as stack:
        for path, clients, bodies in case.loads:
            await stack.enter_async_context(loaded(server, clients, bodies, path))
        report = await watched(server, **case.options)
    assert tuple(one.number for one in report.findings[:2]) == case.numbers, report.text()
    assert report.findings[0].where == f"{server.url} {case.where}"


async def test_the_doctor_finds_clients_that_send_one_request_at_a_time(
    servers: list[DoctorsTriton],
) -> None:
    """The doctor finds cause 35 (clients ask one at a time), and nothing after the cure."""
    server = servers[0]
    await server.load(plain())
    async with loaded(server, 1):
        assert first(await watched(server), 35).found.changes[0].now == "1"
    async with loaded(server, 16):
        assert (await watched(server)).findings == ()


async def test_the_doctor_finds_a_hot_worker_and_differing_workers(
    servers: list[DoctorsTriton],
) -> None:
    """The doctor finds causes 37 (one worker has all the load), 38 (workers differ) and 39 (a
    client's single connection keeps one server busy), and nothing after each cure.
    """
    for server in servers:
        await server.load(plain())
    async with loaded(servers[0], 24), loaded(servers[1], 1, pause_s=0.2):
        found = first(await watched(*servers), 37)
    assert servers[0].url in found.found.evidence
    async with loaded(servers[0], 16), loaded(servers[1], 16):
        assert (await watched(*servers)).findings == ()
    await servers[1].load(plain())
    async with loaded(servers[0], 24):
        found = first(await watched(*servers), 39)
    assert "the 1 others had none" in found.found.evidence
    await servers[1].load(plain(batch=4))
    async with loaded(servers[0], 16), loaded(servers[1], 8):
        found = first(await watched(*servers), 38)
    change = found.found.changes[0]
    assert (change.name, change.now) == (f"{servers[1].url} m: max_batch_size", "4")
    await servers[1].load()


SECTION = (CHECKOUT / "docs" / "triton.md").read_text(encoding="utf-8")


def shown() -> tuple[list[str], list[str]]:
    """Return the command of the doctor and its output as docs/triton.md prints them."""
    block = re.search(r"```\n\$ warmroute (doctor .*?)```", SECTION, re.DOTALL)
    assert block is not None
    command, *lines = block[1].splitlines()
    return command.split(), [line.strip() for line in lines if line.startswith("   ")]


async def test_the_documented_doctor_command_leads_to_the_cure(
    servers: list[DoctorsTriton],
) -> None:
    """The command of docs/triton.md prints the output on the page, and no fault after the field
    that it names is changed.
    """
    server, (words, lines) = servers[0], shown()
    words = [server.target if word == "http://gpu1:8000" else word for word in words]
    request = text_request(words=1000, longest=1060)
    await server.load(llm(kv_tokens=2560, max_tokens_in_paged_kv_cache=2560, answer=60))
    async with loaded(server, 8, request, GENERATE):
        status, out = await command(*words)
    assert status == 1
    assert "1. the KV cache holds one request (cause 13)" in out
    for line in lines:
        pattern = re.escape(line).replace("8\\ active", r"[78][.\d]*\ active")
        pattern = re.sub(r"or\\ 16480", r"or\\ 1[56]\\d+", pattern)
        assert re.search(pattern, out), (line, out)
    await server.load(llm(kv_tokens=65_536, answer=60))
    async with loaded(server, 8, request, GENERATE):
        status, out = await command(*words)
    assert (status, out.splitlines()[0]) == (0, f"No cause found in {WATCH_S:.0f} s under load.")


async def test_measured_service_times_equal_the_models(
    servers: list[DoctorsTriton], tmp_path: Path
) -> None:
    """The times that the doctor measures for a planner are the model's: 10 ms, and 5 ms for each
    request of a batch.
    """
    server = servers[0]
    await server.load(plain(base_ms=10, per_ms=5))
    limits = ProbeLimits(requests=400, concurrency=8, seconds=30.0)
    measured = (await watched(server, probe=limits)).measured
    assert measured is not None
    file = tmp_path / "times.json"
    file.write_text(json.dumps(measured))
    assert fit(read_measured(file)).model == "m"
    assert (measured["model"], measured["max_batch_size"], measured["instances"]) == ("m", 8, 1)
    times = {one["batch"]: one["seconds"] for one in measured["sizes"]}
    assert min(times) == 1
    assert len(times) >= 2
    for batch, seconds in times.items():
        assert seconds >= (10 + 5 * batch) / 1e3, times
