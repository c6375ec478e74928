"""Tests of real vLLM servers with unexpected settings or false reports.

The router's log or `/workers` names each problem, and none is fatal: requests are answered.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import zmq.asyncio

from router.doctor.examine import Options, examine
from router.doctor.report import DoctorError
from router.doctor.routing.examine import RoutingOptions, examine_routing
from router.engines.vllm import RENDERER
from tests.engines.lying_front import LyingFront, fronted
from tests.engines.pool import SERIALS, Pool, routed, started
from tests.engines.traffic import requests
from tests.engines.vllm_server import BLOCK_SIZE, BLOCKS, MODEL
from tests.live.event_relay import EventRelay, relaying
from tests.live.stack import until

# vLLM publishes a step's blocks in its own thread, and answers may overtake it.
EVENT_WAIT_S = 0.05

pytestmark = pytest.mark.asyncio(loop_scope="session")

SEAT = 1  # the worker whose server is replaced, since no more than two run at a time
OTHER_NAME, OTHER_SIZE = "other", 128
JUDGED_BY = 16  # answers, as in docs/reference/failures.md
PROMPT_BLOCKS = 3
FULL = pytest.mark.full  # tests/router tests each case with workers of its own


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def seat(vllm: Pool) -> AsyncIterator[Pool]:
    """Yield the pool with only one of its two servers; start the other one again at the end."""
    resting = vllm.servers[SEAT]
    await resting.stop()
    yield vllm
    await resting.start()
    await resting.until_healthy()
    await vllm.router.until_state(SEAT, "ready")


def prompt() -> list[int]:
    """Return token ids whose prefix no other prompt has: whole blocks and one token more."""
    draw = random.Random(10_000 + next(SERIALS))
    return [draw.randrange(3, 4000) for _ in range(PROMPT_BLOCKS * BLOCK_SIZE + 1)]


async def completed(pool: Pool, tokens: list[int], model: str = MODEL) -> int:
    """Complete a prompt; return the cached tokens that the answer's usage reports."""
    body = {"model": model, "prompt": tokens, "max_tokens": 1}
    status, answer = await pool.ask("/v1/completions", body)
    assert status == 200, answer
    details = answer["usage"]["prompt_tokens_details"] or {}
    cached = details.get("cached_tokens") or 0
    return cached if isinstance(cached, int) else 0


async def expectations(pool: Pool, lines: int) -> list[tuple[int, int]]:
    """Wait for `lines` lines of the access log; return each request's (expected, reported) hit
    tokens.
    """

    async def written() -> bool:
        return pool.access_log.exists() and len(pool.logged()) >= lines

    await until(written, f"{lines} lines of the access log")
    return [(one["expected_hit_tokens"], one["cached_tokens"]) for one in pool.logged()]


async def until_row(
    pool: Pool, worker: int, what: str, shown: Callable[[dict[str, Any]], Any]
) -> None:
    async def reached() -> bool:
        return bool(shown(await pool.router.row(worker)))

    await until(reached, f"worker {worker}: {what}")


async def until_logged(pool: Pool, text: str) -> None:
    """Wait until the router's log has this text."""

    async def logged() -> bool:
        return text in pool.router.router.log.read_text()

    await until(logged, f"{text!r} in the router's log")


def ready(row: dict[str, Any]) -> bool:
    return row["state"] == "ready"


async def test_a_server_with_another_model_name_and_no_events_is_its_own_pool(seat: Pool) -> None:
    """A server without events and with another model name is a pool of its own, and the router
    estimates its cache.
    """
    async with (
        started(seat, name=OTHER_NAME, publishes=False) as mute,
        routed(seat, servers=(seat.servers[0], mute)) as pool,
    ):
        await until_row(pool, 0, "ready", ready)
        await until_row(pool, 1, "ready", ready)
        honest, row = await pool.router.rows()
        assert (row["kind"], row["events"], row["block_size"]) == ("vllm", None, 2 * BLOCK_SIZE)
        assert "--kv-events-config" in row["advice"]
        assert honest["advice"] is None
        await until_logged(pool, "--kv-events-config")
        tokens = prompt()
        for model in (MODEL, OTHER_NAME):
            assert await completed(pool, tokens, model) == 0
            assert await completed(pool, tokens, model) == PROMPT_BLOCKS * BLOCK_SIZE
        # The mirror counts blocks of twice the size.
        whole = PROMPT_BLOCKS // 2 * 2 * BLOCK_SIZE
        assert (await expectations(pool, 4))[3] == (whole, PROMPT_BLOCKS * BLOCK_SIZE)
        status, refused = await pool.ask("/v1/completions", {"model": "nobody's", "prompt": "x"})
        assert (status, refused["error"]["code"]) == (404, "model_not_found")

        specs = (seat.servers[0].spec, f"{mute.url},model={MODEL}")
        async with routed(seat, *specs) as pool:
            await until_row(pool, 0, "ready", ready)
            await until_row(pool, 1, "in trouble", lambda row: row["trouble"])
            row = await pool.router.row(1)
            assert row["state"] == "joining"
            assert f"no model {MODEL!r}" in row["trouble"]
            assert OTHER_NAME in row["trouble"]
            await until_logged(pool, row["trouble"])
            for _ in range(6):
                await completed(pool, prompt())


async def test_a_render_server_is_not_used_as_a_worker(seat: Pool) -> None:
    """A server that only renders prompts is no worker: `/workers`, the log and the doctor name it,
    and the rest of the pool keeps serving.
    """
    async with started(seat, renders=True) as renderer:
        async with routed(seat, seat.servers[0].spec, renderer.url) as pool:
            await until_row(pool, 0, "ready", ready)
            await until_row(pool, 1, "in trouble", lambda row: row["trouble"])
            row = await pool.router.row(1)
            assert (row["state"], row["trouble"]) == ("joining", RENDERER)
            await until_logged(pool, RENDERER)
            assert await completed(pool, prompt()) == 0
            options = RoutingOptions(seconds=0.1, timeout_s=5.0, again="again")
            report = await examine_routing([pool.router.admin], options)
            assert RENDERER in report.text()
        with pytest.raises(DoctorError, match="it is a renderer, not a worker"):
            await examine([renderer.url], Options(seconds=0.2))


@pytest.mark.full
async def test_a_render_server_makes_token_ids_also_after_a_restart(seat: Pool) -> None:
    """A render server makes token ids for a router without a tokenizer, also after it was killed
    and restarted; the worker does not render prompts itself.
    """
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    async with started(seat, renders=True, flags=flags) as renderer:
        more = ("--renderers", renderer.url, "--policy", "round_robin")
        spec = seat.servers[0].spec
        async with routed(seat, spec, tokenizes=False, more=more) as pool:

            def is_because(mode: str, cause: str | None) -> Callable[[dict[str, Any]], bool]:
                def shown(row: dict[str, Any]) -> bool:
                    hits = row.get("hits")
                    return bool(hits and (hits["mode"], hits["cause"]) == (mode, cause))

                return shown

            async def answered(seed: int, count: int) -> list[tuple[int, int]]:
                before, asked = len(pool.logged()), 0
                for path, body in requests(seed, count):
                    if body["model"] == MODEL:
                        status, answer = await pool.ask(path, body)
                        assert status == 200, answer
                        asked += 1
                        await asyncio.sleep(EVENT_WAIT_S)
                return (await expectations(pool, before + asked))[before:]

            await until_row(pool, 0, "exact", is_because("exact", None))
            seen = await answered(41, 60)
            assert other_blocks(seen) == []
            assert sum(cached > 0 for _, cached in seen) > len(seen) / 4
            await renderer.kill()
            await answered(42, 12)
            await until_row(pool, 0, "approximate", is_because("approximate", "renderer-failing"))
            await renderer.start()
            await renderer.until_healthy()
            await until_row(pool, 0, "exact again", is_because("exact", None))
            assert other_blocks(await answered(43, 12)) == []


def other_blocks(seen: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the requests whose expected and reported numbers of cached blocks differ; vLLM counts
    whole blocks.
    """
    return [one for one in seen if one[0] // BLOCK_SIZE != one[1] // BLOCK_SIZE]


@FULL
async def test_hits_are_exact_with_different_block_sizes_in_one_pool(seat: Pool) -> None:
    """Hits are exact at two servers with different block sizes, and an operator who configures a
    wrong block size gets advice.
    """
    async with started(seat, block_size=OTHER_SIZE, blocks=BLOCKS // 4) as coarse:
        # The default policy would fill the new server's empty cache first.
        servers = (seat.servers[0], coarse)
        async with routed(seat, servers=servers, more=("--policy", "round_robin")) as pool:
            await until_row(pool, 0, "ready", ready)
            await until_row(pool, 1, "ready", ready)
            assert [row["block_size"] for row in await pool.router.rows()] == [
                BLOCK_SIZE,
                OTHER_SIZE,
            ]
            for path, body in requests(seed=21, count=80):
                status, answer = await pool.ask(path, body)
                assert status == 200, answer
            seen = await expectations(pool, 80)
            assert [one for one in seen if one[0] != one[1]] == []
            workers = {line["worker"] for line in pool.logged()}
            assert workers == {0, 1}, workers
            await pool.until_true()
        options = f"block_size={BLOCK_SIZE},{coarse.events_option}"
        async with routed(seat, f"{coarse.url},{options}") as pool:
            await until_row(pool, 0, "ready", ready)
            row = await pool.router.row(0)
            assert (
                f"block_size={BLOCK_SIZE} was given, but it reports {OTHER_SIZE}" in row["advice"]
            )
            tokens = prompt() + prompt()
            for _ in range(2):
                await completed(pool, tokens)
            await until_logged(pool, f"blocks of {OTHER_SIZE} tokens")


Lie = Callable[[str], str]


@asynccontextmanager
async def behind_lying_proxy(
    vllm: Pool, events: str | None = None, **changes: Lie
) -> AsyncIterator[tuple[LyingFront, Pool]]:
    """Yield a router whose server is behind a proxy that changes its answers to `metrics` or
    `completions`.
    """
    server = vllm.servers[0]
    paths = {"metrics": "/metrics", "completions": "/v1/completions"}
    async with fronted(server.url) as front:
        front.changes |= {paths[name]: change for name, change in changes.items()}
        spec = f"{front.url},{events}" if events else server.spec_at(front.url)
        async with routed(vllm, spec) as pool:
            await until_row(pool, 0, "ready", ready)
            yield front, pool


def with_cached_tokens(text: str, value: Any) -> Lie:
    """Return a function that changes the count of cached tokens in JSON answers."""

    def lie(answer: str) -> str:
        told = msgspec.json.decode(answer)
        told["usage"]["prompt_tokens_details"] = {text: value}
        return msgspec.json.encode(told).decode()

    return lie


async def warm(pool: Pool, prompts: int) -> list[list[int]]:
    """Complete new prompts and wait until the router knows that the server holds them."""
    made = [prompt() for _ in range(prompts)]
    for tokens in made:
        await completed(pool, tokens)
    question = {"model": MODEL, "prompt": made[-1]}

    async def known() -> bool:
        async with pool.router.http.post(f"{pool.router.admin}/explain", json=question) as reply:
            best = (await reply.json())["best"]
        return bool(best[0]["hit_tokens"] == PROMPT_BLOCKS * BLOCK_SIZE)

    await until(known, "the prompts' events")
    return made


@FULL
async def test_wrong_counts_of_cached_tokens_are_ignored(vllm: Pool) -> None:
    """The router ignores impossible counts of cached tokens; if answers deny expected hits again
    and again, it stops expecting them.
    """
    async with behind_lying_proxy(vllm) as (front, pool):
        for nonsense in (-1, 10**9, "many", None, [3], 1.5):
            front.changes["/v1/completions"] = with_cached_tokens("cached_tokens", nonsense)
            await completed(pool, tokens := prompt())
            await completed(pool, tokens)
        front.changes["/v1/completions"] = lambda answer: answer
        assert (await pool.router.row(0))["hit_confidence"] == 1.0
        prompts = await warm(pool, JUDGED_BY)
        front.changes["/v1/completions"] = with_cached_tokens("cached_tokens", 0)
        for tokens in prompts:
            await completed(pool, tokens)
        assert (await pool.router.row(0))["hit_confidence"] < 0.5
        await until_logged(pool, "answers keep finding less than its KV events promise")
        assert await completed(pool, prompts[0]) == 0
        assert (await pool.router.row(0))["state"] == "ready"


def doubled_block_size(figures: str) -> str:
    return figures.replace(f'block_size="{BLOCK_SIZE}"', f'block_size="{2 * BLOCK_SIZE}"')


def few_blocks(figures: str) -> str:
    return figures.replace(f'num_gpu_blocks="{BLOCKS}"', 'num_gpu_blocks="8"')


def usage_above_1(figures: str) -> str:
    lines = figures.splitlines()
    gauge = "vllm:kv_cache_usage_perc{"
    return "\n".join(f'{gauge}engine="0"}} 7.5' if gauge in line else line for line in lines)


@pytest.mark.parametrize(
    ("lie", "named"),
    [
        (doubled_block_size, f"blocks of {BLOCK_SIZE} tokens, it says {2 * BLOCK_SIZE}: followed"),
        pytest.param(
            *(few_blocks, "its KV events tell of more blocks than it has room for"), marks=FULL
        ),
        pytest.param(
            *(usage_above_1, "its load figures are of no use: KV usage is 7.5"), marks=FULL
        ),
    ],
)
async def test_wrong_block_figures_are_reported(vllm: Pool, lie: Lie, named: str) -> None:
    async with behind_lying_proxy(vllm, metrics=lie) as (front, pool):
        assert await proxy_changes_metrics(front, lie)
        for _ in range(JUDGED_BY):
            await completed(pool, tokens := prompt())
            assert await completed(pool, tokens) == PROMPT_BLOCKS * BLOCK_SIZE
        await until_logged(pool, named)
        assert pool.router.router.log.read_text().count(named) < 8
        assert (await pool.router.row(0))["state"] == "ready"


async def proxy_changes_metrics(front: LyingFront, lie: Lie) -> bool:
    async with front.http.get(f"{front.upstream}/metrics") as reply:
        figures = await reply.text()
    return lie(figures) != figures


def without_removals(payload: bytes) -> bytes:
    """Return the batch without its events of evicted blocks."""
    batch = msgspec.msgpack.decode(payload)
    batch[1] = [event for event in batch[1] if kind_of(event) == "BlockStored"]
    return msgspec.msgpack.encode(batch)


def of_other_tokens(payload: bytes) -> bytes:
    """Return the batch with other tokens in its blocks than the server computed."""
    batch = msgspec.msgpack.decode(payload)
    for event in batch[1]:
        if kind_of(event) == "BlockStored":
            key: Any = "token_ids" if isinstance(event, dict) else 3
            event[key] = [token + 1 for token in event[key]]
    return msgspec.msgpack.encode(batch)


def kind_of(event: Any) -> str:
    """Return the type of an event, which is a map or an array."""
    return str(event["type"] if isinstance(event, dict) else event[0])


@asynccontextmanager
async def with_rewritten_events(
    vllm: Pool, rewrite: Callable[[bytes], bytes]
) -> AsyncIterator[Pool]:
    """Yield a router that receives a server's events from a relay that rewrites them."""
    context = zmq.asyncio.Context()
    live, replay = (f"tcp://127.0.0.1:{port}" for port in vllm.servers[0].events)
    relay = EventRelay(context, random.Random(1), live, replay, rewrite)
    try:
        async with relaying(relay):
            events = f"events={relay.live},replay={relay.replay}"
            async with behind_lying_proxy(vllm, events) as (_, pool):
                yield pool
    finally:
        context.destroy(linger=0)


@FULL
async def test_known_blocks_are_bounded_if_events_omit_evictions(vllm: Pool) -> None:
    """If events leave out evictions, the router bounds the believed blocks by the cache's size and
    by the hits that answers report.
    """
    async with with_rewritten_events(vllm, without_removals) as pool:
        prompts = [prompt() for _ in range(int(BLOCKS * 1.3) // PROMPT_BLOCKS)]
        for tokens in prompts:
            await completed(pool, tokens)
        await until_logged(pool, "its KV events tell of more blocks than it has room for")
        row = await pool.router.row(0)
        assert row["state"] == "ready"
        assert row["kv_overflows"] >= 1  # the replayed part may have overflows, too
        assert row["resident_blocks"] <= BLOCKS * 1.25


async def test_events_with_wrong_tokens_mislead_no_request(vllm: Pool) -> None:
    """Events with wrong tokens mislead no request: no worker holds the blocks that the router
    believes in, and real hits still happen.
    """
    async with with_rewritten_events(vllm, of_other_tokens) as pool:
        tokens = prompt()
        assert await completed(pool, tokens) == 0
        for _ in range(4):
            assert await completed(pool, tokens) == PROMPT_BLOCKS * BLOCK_SIZE
        await until_row(pool, 0, "blocks told of", lambda row: row["resident_blocks"])
        assert (await pool.router.row(0))["state"] == "ready"
        assert (await pool.indexed(0)).isdisjoint(await vllm.held(0))
