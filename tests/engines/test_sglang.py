"""Tests of the router with real SGLang: recognition of the engine, exact tokens and hits, and a
correct index.

One server has SGLang's prefix tree in Rust, which is the default and reports how many pages it has.
The other has the tree in Python, whose pages can be compared with the index one by one.
"""

from __future__ import annotations

import asyncio
import random

import aiohttp
import pytest

from router.engines.sglang import loads_in, old_loads_in, v1_loads_in
from tests.effort import QUICK
from tests.engines.answered import answer_of, base_requests
from tests.engines.heard import until_events_resume
from tests.engines.pool import Pool, routed
from tests.engines.sglang_server import SglangServer
from tests.engines.streamed import stream
from tests.engines.traffic import words
from tests.engines.vllm_server import BLOCK_SIZE, BLOCKS, MODEL, Server
from tests.live.stack import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

PREDICTIONS = 150 if QUICK else 400
RENDERED = 60  # requests whose token ids SGLang makes
STREAMS = 6
TOKENS = 100
RUST, PYTHON = 0, 1  # workers


async def until_true(pool: Pool) -> None:
    """Wait until the router's index equals the prefix tree in Python and has as many blocks as the
    tree in Rust.
    """
    rust = pool.servers[RUST]
    assert isinstance(rust, SglangServer)

    async def equal() -> bool:
        return await pool.indexed(PYTHON) == await pool.held(PYTHON)

    async def as_large() -> bool:
        return len(await pool.indexed(RUST)) == await rust.pages()

    await until(equal, "the index to equal the tree in Python")
    await until(as_large, "the index to have as many blocks as the tree in Rust")


async def test_a_server_is_recognized_by_its_url(sglang: Pool) -> None:
    for row in await sglang.router.rows():
        assert (row["kind"], row["block_size"], row["state"]) == ("sglang", BLOCK_SIZE, "ready")
        assert row["kv_capacity_tokens"] == BLOCKS * BLOCK_SIZE
        assert row["events_from"] == "read here"


async def test_hits_are_exact_because_sglang_reports_no_windows_or_states(sglang: Pool) -> None:
    """The router treats hits as exact, because SGLang reports that no layer has a sliding window or
    states, which its events would leave out.
    """

    async def exact() -> bool:
        return [row["hits"]["mode"] for row in await sglang.router.rows()] == ["exact"] * 2

    await until(exact, "the workers to be exact")


async def test_hits_and_index_equal_those_of_sglangs_tree(sglang: Pool) -> None:
    """The router's expected hits equal SGLang's, and its index equals SGLang's tree, if requests
    are sent one at a time.
    """
    before, told = len(sglang.logged()), []
    for path, body in base_requests(seed=1, count=PREDICTIONS):
        status, answer = await sglang.ask(path, body)
        assert status == 200, answer
        told.append(answer["usage"]["prompt_tokens"])

    async def written() -> bool:
        return len(sglang.logged()) >= before + len(told)

    await until(written, "all lines of the access log")
    lines = sglang.logged()[before:]
    assert [line["prompt_tokens"] for line in lines] == told
    off = [line for line in lines if line["expected_hit_tokens"] != line["cached_tokens"]]
    shown = [(line["path"], line["expected_hit_tokens"], line["cached_tokens"]) for line in off]
    print(f"\n{len(lines) - len(off)} of {len(lines)} exact; off: {shown}")
    assert not off, shown
    assert {line["worker"] for line in lines} == {RUST, PYTHON}
    assert sum(line["cached_tokens"] for line in lines) > 0
    for server in sglang.servers:
        assert "tree core" in server.log.read_text().lower()
    await until_true(sglang)


async def test_hits_are_as_expected_with_token_ids_from_sglang(sglang: Pool) -> None:
    """The router's expected hits are right if it has no tokenizer and asks the servers for the
    token ids of each prompt.
    """
    servers = tuple(sglang.servers)
    async with routed(sglang, servers=servers, tokenizes=False) as pool:

        async def exact() -> bool:
            hits = [row.get("hits") for row in await pool.router.rows()]
            return all(one and one["mode"] == "exact" for one in hits)

        await until(exact, "the servers to give token ids")
        asked = list(base_requests(seed=31, count=RENDERED))
        for path, body in asked:
            status, answer = await pool.ask(path, body)
            assert status == 200, answer

        async def written() -> bool:
            return len(pool.logged()) >= len(asked)

        await until(written, "all lines of the access log")
        lines = pool.logged()
        off = [line for line in lines if line["expected_hit_tokens"] != line["cached_tokens"]]
        assert not off, [(one["expected_hit_tokens"], one["cached_tokens"]) for one in off]
        assert sum(line["cached_tokens"] > 0 for line in lines) > RENDERED / 4


async def test_the_index_is_right_after_concurrent_requests_that_evict(sglang: Pool) -> None:
    async def client(number: int) -> None:
        for path, body in base_requests(seed=100 + number, count=25):
            status, answer = await sglang.ask(path, body)
            assert status == 200, answer

    await asyncio.gather(*(client(number) for number in range(8)))
    await until_true(sglang)
    assert (await sglang.router.metric("warmroute_kv_events_total")) > 0
    assert await sglang.held(PYTHON)


async def test_a_flushed_cache_is_known_to_be_empty(sglang: Pool) -> None:
    for server in sglang.servers:

        async def flushed(server: Server = server) -> bool:
            return (await server.post("/flush_cache"))[0] == 200  # 400: requests are still running

        await until(flushed, "SGLang to flush its cache")
    await until_true(sglang)
    assert await sglang.indexed(RUST) == await sglang.indexed(PYTHON) == set()


async def test_routed_answers_equal_the_servers(sglang: Pool) -> None:
    """The router's answers at temperature 0, one at a time, equal the server's except for ids,
    times and cached tokens.
    """
    for path, body in base_requests(seed=5, count=16):
        body |= {"temperature": 0, "max_tokens": 8}
        for extra in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
            routed = await answer_of(sglang.router.url, path, body | extra)
            direct = await answer_of(sglang.servers[RUST].url, path, body | extra)
            assert routed == direct


async def test_the_load_is_read_from_the_loads_path_and_from_metrics(sglang: Pool) -> None:
    """The router reads the number of running requests from `/v1/loads` and from Prometheus metrics;
    `/get_load` no longer exists.
    """
    server = sglang.servers[RUST]
    body = {"model": MODEL, "prompt": words(random.Random(7), 60), "max_tokens": 400}
    asked = [
        asyncio.create_task(server.post("/v1/completions", body | {"ignore_eos": True, "n": 3}))
    ]

    async def busy() -> bool:
        loads = v1_loads_in(await _text(f"{server.url}/v1/loads"))[0]
        shown = loads_in(await _text(f"{server.url}/metrics"))[0]
        return bool(loads.running == shown.running == 3 and loads.kv_used_tokens > 0)

    await until(busy, "both to tell of three requests")
    with pytest.raises(Exception, match="get_load"):
        old_loads_in(await _text(f"{server.url}/get_load"))
    await asyncio.gather(*asked)


async def test_the_index_is_complete_again_after_events_resume(sglang: Pool) -> None:
    await until_events_resume(sglang)


@pytest.mark.full
async def test_streams_survive_kill_9_and_the_server_comes_back_empty(sglang: Pool) -> None:
    streams = [asyncio.create_task(stream(sglang, n, TOKENS)) for n in range(STREAMS)]

    async def under_way() -> bool:
        rows = await sglang.router.rows()
        return sum(row["context_tokens"] > 0 for row in rows) == len(rows)

    await until(under_way, "streams at both servers")
    victim = sglang.servers[PYTHON]
    await victim.kill()
    try:
        assert await asyncio.gather(*streams) == [(["length"], TOKENS)] * STREAMS
        path, body = next(base_requests(seed=50, count=9))
        assert (await sglang.ask(path, body))[0] == 200
    finally:
        await victim.start()
        await victim.until_healthy()
    await sglang.router.until_state(PYTHON, "ready")
    for path, body in base_requests(seed=51, count=20):
        assert (await sglang.ask(path, body))[0] == 200
    await until_true(sglang)


async def _text(url: str) -> str:
    async with aiohttp.request("GET", url) as reply:
        return await reply.text()
