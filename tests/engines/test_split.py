"""Tests of prefill at one engine and decode at another, the same for vLLM and our engine.

Both use the same protocol (`kv_transfer_params`), so each test runs for both pairs.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from simulator.live.processes import Programs
from tests.engines.environment import NEWEST_VLLM, Environment
from tests.engines.traffic import words
from tests.engines.vllm_server import MODEL, Server
from tests.live.ports import lasting_port
from tests.live.stack import Stack, metric_sum, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
# The first transfer of a pair blocks a vLLM on a CPU for this long: its threads share one core.
HANDSHAKE_S = 60.0
LEASE_S = 30.0
ROLES = ("prefill", "decode")
KV_USED = "vllm:kv_cache_usage_perc"
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
NAMES = {"remote_engine_id", "remote_block_ids", "remote_request_id", "remote_host", "remote_port"}


class SplitServer(Server):
    """A server that sends its KV to other servers and fetches theirs."""

    def variables(self) -> dict[str, str]:
        return {**super().variables(), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(lasting_port())}


# vLLM's server closes connections that are idle for five seconds, and a request that begins in that
# moment is lost: our client uses none that was idle for so long. It must not close them at once
# either, for our engine gives KV back where the client that was told of it hangs up.
IDLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Split:
    """A prefill and a decode engine behind a router.

    Lifetime: module of tests, once for each kind of engine.
    """

    router: Stack
    urls: tuple[str, str]  # of the worker that prefills, and of the one that decodes
    processes: tuple[int, int]  # whose groups they are
    moved: str  # the decoding worker's count of KV that came
    access_log: Path

    async def ask(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return await self.ask_at(self.router.url, path, body)

    async def ask_at(self, url: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with self.router.http.post(f"{url}{path}", json=body) as reply:
            return reply.status, await reply.json()

    async def counted(self, server: int, metric: str) -> float:
        return await metric_sum(self.router.http, self.urls[server], metric)

    async def at_rest(self) -> None:
        """Wait until no request runs and all KV blocks are free or reusable."""
        await self.router.assert_idle()

        async def idle() -> bool:
            names = (KV_USED, "vllm:num_requests_running", "vllm:num_requests_waiting")
            return not any([await self.counted(n, name) for n in (0, 1) for name in names])

        # If a prefill's client leaves just as it ends, vLLM keeps its KV for the lease of 30 s.
        await until(idle, "all KV to be free", 2 * LEASE_S)

    async def until_split(self, marker: int, requests: int) -> None:
        """Wait until `requests` answers of `marker` tokens are logged, and check that each came
        from a prefill and a decode worker.
        """

        async def written() -> bool:
            lines = [json.loads(line) for line in self.access_log.read_text().splitlines()]
            legs = [one["attempts"] for one in lines if one["output_tokens"] == marker]
            assert set(legs) <= {2}
            return len(legs) == requests

        await until(written, f"{requests} requests of two legs")


@asynccontextmanager
async def vllms(folder: Path, model: Path) -> AsyncIterator[Callable[[Programs], Any]]:
    environment = Environment("vllm", NEWEST_VLLM).or_skip()
    flags = ("--kv-transfer-config", json.dumps(CONNECTOR))
    servers = [SplitServer(environment, model, folder / role, flags=flags) for role in ROLES]

    async def start(_: Programs) -> tuple[list[str], list[int], str]:
        await asyncio.gather(*(server.start() for server in servers))
        await asyncio.gather(*(server.until_healthy() for server in servers))
        pids = [server.process.pid for server in servers if server.process is not None]
        return [server.url for server in servers], pids, "vllm:nixl_bytes_transferred_sum"

    try:
        yield start
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


@asynccontextmanager
async def ours(folder: Path, model: Path) -> AsyncIterator[Callable[[Programs], Any]]:
    async def start(programs: Programs) -> tuple[list[str], list[int], str]:
        flags = ["--model-name", MODEL, "--threads", "1", "--max-model-len", "4096"]
        started = [
            await programs.start(
                role, "engine",
                ["serve", str(model), "--port", str(lasting_port()), "--role", role, *flags],
            )
            for role in ROLES
        ]  # fmt: skip
        pids = [one.process.pid for one in started]
        return [one.url for one in started], pids, "warmroute_engine_kv_bytes_total"

    yield start


KINDS = {"vllm": vllms, "warmroute": ours}


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=KINDS)
async def split(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> AsyncIterator[Split]:
    folder = tmp_path_factory.mktemp("split")
    async with (
        KINDS[request.param](folder, model) as start,
        Programs(folder) as programs,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(keepalive_timeout=IDLE_S)) as http,
    ):
        urls, pids, moved = await start(programs)
        log = folder / "access.jsonl"
        arguments = ["serve", "--port", "0", "--admin-port", "0", "--tokenizer", str(model)]
        arguments += ["--access-log", str(log), "--timeouts-stall-s", str(HANDSHAKE_S)]
        arguments += ["--disaggregation", "always", "--retries-backoff-s", "0"]
        for url, role in zip(urls, ROLES, strict=True):
            arguments += ["--worker", f"{url},role={role}"]
        router = Stack(programs, await programs.start("router", "router", arguments), [], http)
        for worker_id in range(len(urls)):
            await router.until_state(worker_id, "ready")
        yield Split(router, (urls[0], urls[1]), (pids[0], pids[1]), moved, log)


def path_and_body(serial: int, output: int = 8) -> tuple[str, dict[str, Any]]:
    text = words(random.Random(1_000 + serial), 600)
    common = {"model": MODEL, "max_tokens": output, "temperature": 0, "ignore_eos": True}
    if serial % 2:
        return "/v1/completions", common | {"prompt": text}
    return "/v1/chat/completions", common | {"messages": [{"role": "user", "content": text}]}


def text_and_end(answer: Any) -> Any:
    (choice,) = answer["choices"]
    # A token of a small random model may have no text.
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, choice["finish_reason"]


async def test_split_answers_equal_those_of_one_server_and_kv_is_sent(split: Split) -> None:
    before = await split.counted(1, split.moved)
    for serial in range(6):
        path, body = path_and_body(serial, 9)
        status, answer = await split.ask(path, body)
        assert status == 200, answer
        _, direct = await split.ask_at(split.urls[1], path, body)
        assert text_and_end(answer) == text_and_end(direct)
        assert not answer.get("kv_transfer_params"), "no worker's address for clients"
        assert answer["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]
    assert await split.counted(1, split.moved) > before
    assert await split.counted(0, "vllm:nixl_num_kv_expired_reqs_total") == 0
    await split.at_rest()
    await split.until_split(9, requests=6)


async def test_a_seed_gives_the_same_tokens_in_two_legs(split: Split) -> None:
    """A seed gives the same tokens with a prefill and a decode worker: the prefill worker's token,
    which is discarded, does not change the random draws.
    """
    for serial in range(4):
        path, body = path_and_body(20 + serial)
        body |= {"temperature": 1.0, "seed": serial}
        _, direct = await split.ask_at(split.urls[1], path, body)
        assert text_and_end((await split.ask(path, body))[1]) == text_and_end(direct)


async def test_a_stream_gives_the_same_text_as_the_unstreamed_answer(split: Split) -> None:
    path, body = path_and_body(31)
    whole = (await split.ask(path, body))[1]
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with split.router.http.post(f"{split.router.url}{path}", json=body) as reply:
        assert reply.status == 200
        lines = (await reply.text()).split("\n\n")
    events = [json.loads(one.removeprefix("data: ")) for one in lines[:-2]]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == whole["choices"][0]["text"]
    assert events[-1]["usage"]["completion_tokens"] == 8
    assert lines[-2] == "data: [DONE]"


async def test_the_two_legs_work_if_called_by_hand(split: Split) -> None:
    """Prefill and decode, called one after the other by hand, work with the names and unchanged
    parameters on which the router's adapter relies; unknown fields are ignored.
    """
    path, body = path_and_body(41)
    first = {**body, "max_tokens": 1, "kv_transfer_params": ASK}
    status, kept = await split.ask_at(split.urls[0], path, first)
    assert status == 200
    params = kept["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert params.keys() >= NAMES
    _, direct = await split.ask_at(split.urls[0], path, body)
    before = await split.counted(1, split.moved)
    second = body | {"kv_transfer_params": params | {"of_a_later_release": {"a": [1]}}}
    status, answer = await split.ask_at(split.urls[1], path, second)
    assert (status, text_and_end(answer)) == (200, text_and_end(direct))
    assert await split.counted(1, split.moved) > before
    await split.at_rest()


@pytest.mark.parametrize("fields", [{"n": 2}, {"echo": True}, {"prompt_logprobs": 1}], ids=str)
async def test_requests_that_cannot_be_split_go_to_one_worker(
    split: Split, fields: dict[str, Any]
) -> None:
    path, body = path_and_body(61)
    before = await split.router.metric('warmroute_legs_total{leg="prefill"}')
    body |= fields | {"temperature": 0.5}
    status, answer = await split.ask(path, body)
    assert (status, len(answer.get("choices", ()))) == await one_answers(split, path, body)
    assert await split.router.metric('warmroute_legs_total{leg="prefill"}') == before


async def one_answers(split: Split, path: str, body: dict[str, Any]) -> tuple[int, int]:
    """Return the status and number of choices of one worker's own answer, since not every engine
    serves everything.
    """
    status, answer = await split.ask_at(split.urls[1], path, body)
    return status, len(answer.get("choices", ()))


async def test_an_answer_of_one_token_needs_no_second_leg(split: Split) -> None:
    path, body = path_and_body(71, 1)
    _, direct = await split.ask_at(split.urls[1], path, body)
    assert text_and_end((await split.ask(path, body))[1]) == text_and_end(direct)
    await split.at_rest()


@pytest.mark.parametrize("leg", [0, 1], ids=ROLES)
async def test_a_client_that_disconnects_in_a_leg_leaves_nothing_behind(
    split: Split, leg: int
) -> None:
    """A client that leaves while its request is at a stopped prefill or decode worker leaves no
    request and no KV behind.
    """
    path, body = path_and_body(80 + 2 * leg + 1, 64)
    os.kill(split.processes[leg], signal.SIGSTOP)
    try:
        leaving = asyncio.create_task(split.ask(path, body))

        async def there() -> bool:
            return bool((await split.router.rows())[leg]["inflight_requests"])

        await until(there, "the leg's worker to have it")
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    finally:
        os.kill(split.processes[leg], signal.SIGCONT)
    await split.at_rest()
    path, body = path_and_body(90 + leg)
    assert (await split.ask(path, body))[0] == 200


async def test_the_decode_worker_serves_alone_without_the_prefill_worker(split: Split) -> None:
    """The decode worker serves requests alone after the prefill worker was killed; so this is the
    last test of these engines.
    """
    path, body = path_and_body(101)
    _, direct = await split.ask_at(split.urls[1], path, body)
    os.kill(split.processes[0], signal.SIGSTOP)
    asking = asyncio.create_task(split.ask(path, body))

    async def there() -> bool:
        return bool((await split.router.rows())[0]["inflight_requests"])

    await until(there, "the first leg to have begun")
    os.killpg(split.processes[0], signal.SIGKILL)
    status, answer = await asking
    assert (status, text_and_end(answer)) == (200, text_and_end(direct))
    for serial in (103, 105):
        path, body = path_and_body(serial)
        assert (await split.ask(path, body))[0] == 200
    await split.router.assert_idle()
