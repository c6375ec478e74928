"""Tests of simulated workers that transfer modelled KV: real HTTP, real connections, faults at
either end.
"""

from __future__ import annotations

import asyncio
import json
import random
import select
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from engine.scheduler.types import SchedulerSettings
from engine.timed import continuation
from engine.wire.kv_transfer import (
    Beat,
    Done,
    Hello,
    Part,
    Refusal,
    Release,
    Welcome,
    frame,
    receive,
)
from tests.effort import QUICK
from tests.engine.harness import VOCAB, Running, eventually, running
from tests.engine.split import ASK, PATH, computed, prefilled, split, until_idle

LEASE_S = 0.6


@asynccontextmanager
async def pair(**changes: Any) -> AsyncIterator[tuple[Running, Running]]:
    """Yield a prefill worker and a decode worker; `decode_...` are settings of the decode worker
    alone.
    """
    of_decode = {
        name.removeprefix("decode_"): changes.pop(name)
        for name in [*changes]
        if name.startswith("decode_")
    }
    async with running(**changes) as one, running(**(changes | of_decode)) as other:
        yield one, other


def request_body(seed: int = 0, tokens: int = 100, output: int = 6) -> dict[str, Any]:
    prompt = [random.Random(seed).randrange(VOCAB) for _ in range(tokens)]
    return {"prompt": prompt, "max_tokens": output, "return_token_ids": True}


def ids(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]  # type: ignore[no-any-return]


def failures(worker: Running) -> dict[str, int]:
    assert worker.worker.transfers is not None
    return dict(worker.worker.transfers.importer.failed)


async def test_a_split_answer_is_the_same_and_its_prompt_is_computed_once() -> None:
    async with pair() as (one, other):
        body = request_body()
        answer = await split(one, other, body)
        assert ids(answer) == continuation(body["prompt"], 6, VOCAB)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (computed(one), computed(other)) == (100, 1)
        await until_idle(one, other)
        moved = 7 * 16 * 131_072
        assert one.worker.transfers.exporter.sent_bytes_total == moved
        assert other.worker.transfers.importer.received_bytes_total == moved
        assert other.worker.pool.cached_blocks == 6


async def test_only_uncached_blocks_are_transferred() -> None:
    async with pair() as (one, other):
        body = request_body()
        await other.post(PATH, body | {"prompt": body["prompt"][:64], "max_tokens": 1})
        answer = await split(one, other, body)
        assert ids(answer) == continuation(body["prompt"], 6, VOCAB)
        assert computed(other) == 64 + 1
        assert one.worker.transfers.exporter.sent_bytes_total == 3 * 16 * 131_072
        again = await split(one, other, body | {"prompt": body["prompt"][:97]})
        assert ids(again) == continuation(body["prompt"][:97], 6, VOCAB)
        assert one.worker.transfers.exporter.sent_bytes_total == 3 * 16 * 131_072
        await until_idle(one, other)


async def test_the_time_of_a_transfer_is_proportional_to_its_bytes() -> None:
    """A KV transfer takes as long as its bytes: 100 blocks of 2 MiB at 2 GB/s, and two transfers at
    once over one link twice as long.
    """
    async with pair(speed=1.0, kv_gbytes_per_s=2.0, kv_latency_ms=50.0) as (one, other):
        bodies = [request_body(seed, 1600, 1) for seed in (1, 2)]
        both = [await prefilled(one, body) for body in bodies]
        begun_s = asyncio.get_running_loop().time()
        legs = [body | {"kv_transfer_params": p} for body, p in zip(bodies, both, strict=True)]
        await asyncio.gather(*(other.post(PATH, leg) for leg in legs))
        took_s = asyncio.get_running_loop().time() - begun_s
        moved_s = 2 * 100 * 16 * 131_072 / 2e9
        assert moved_s + 0.05 < took_s < moved_s + 0.5


async def test_chats_and_streams_are_split() -> None:
    async with pair() as (one, other):
        chat = {"messages": [{"role": "user", "content": "a b c " * 40}], "max_tokens": 5}
        path = "/v1/chat/completions"
        answer = await split(one, other, chat, path)
        _, whole = await one.post(path, chat)
        assert answer["choices"][0]["message"] == whole["choices"][0]["message"]
        params = await prefilled(one, chat, path)
        events = await other.events(path, chat | {"kv_transfer_params": params})
        said = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        assert said == whole["choices"][0]["message"]["content"]
        await until_idle(one, other)


@pytest.mark.parametrize(
    "changes",
    [{"stream": True}, {"n": 2}, {"prompt": [[1, 2, 3], [4, 5, 6]]}],
    ids=["stream", "n", "batch"],
)
async def test_requests_that_cannot_be_split_are_answered_and_keep_no_kv(
    changes: dict[str, Any],
) -> None:
    async with running() as one:
        body = request_body() | {"max_tokens": 1, "kv_transfer_params": ASK} | changes
        async with one.http.post(one.url + PATH, json=body) as reply:
            text = await reply.text()
            assert reply.status == 200
        assert '"remote_port"' not in text
        await until_idle(one)


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda params: {key: value for key, value in params.items() if key != name}


def having(**more: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda params: params | more


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without("remote_port"), "incomplete"),
        (without("remote_registration_generation"), "incomplete"),
        (having(remote_request_id="cmpl-x"), "incomplete"),
        (having(transfer_mode="pull"), "foreign"),
        (having(remote_request_id="77"), "unknown"),
        (having(remote_registration_generation=9), "unknown"),
        (having(remote_engine_id="other"), "engine"),
        (having(remote_port=1), "connection"),
        (having(new_key={"a": []}, remote_block_ids=None), None),
    ],
)
async def test_wrong_transfer_parameters_cost_a_prefill(change: Any, reason: str | None) -> None:
    async with pair() as (one, other):
        body = request_body()
        params = change(await prefilled(one, body))
        status, answer = await other.post(PATH, body | {"kv_transfer_params": params})
        assert (status, ids(answer)) == (200, continuation(body["prompt"], 6, VOCAB))
        assert failures(other) == ({reason: 1} if reason else {})
        assert computed(other) == (100 if reason else 1)


@pytest.mark.parametrize(
    "params",
    [3, {"remote_port": -1}, {"remote_host": "x" * 1000}, {"remote_num_tokens": "12"}],
    ids=["number", "port", "host", "tokens"],
)
async def test_transfer_parameters_of_a_wrong_type_are_refused(params: Any) -> None:
    async with running() as one:
        status, answer = await one.post(PATH, request_body() | {"kv_transfer_params": params})
        assert (status, "kv_transfer_params" in answer["error"]["message"]) == (400, True)


async def test_kv_of_one_prompt_is_not_used_for_another_prompt() -> None:
    async with pair() as (one, other):
        params = await prefilled(one, request_body(1))
        status, answer = await other.post(PATH, request_body(2) | {"kv_transfer_params": params})
        assert (status, ids(answer)) == (200, continuation(request_body(2)["prompt"], 6, VOCAB))
        assert failures(other) == {"prompt": 1}


async def test_workers_of_different_models_exchange_no_kv() -> None:
    async with pair(decode_vocab=VOCAB, decode_profile_name="qwen3-32b-h100-tp2") as (one, other):
        answer = await split(one, other, request_body())
        assert ids(answer) == continuation(request_body()["prompt"], 6, VOCAB)
        assert failures(other) == {"model": 1}
        groups = [await info(worker) for worker in (one, other)]
        assert groups[0]["group"] != groups[1]["group"]


async def info(worker: Running) -> Any:
    async with worker.http.get(f"{worker.url}/server_info") as reply:
        return await reply.json()


async def test_blocks_of_another_size_are_imported() -> None:
    async with pair(decode_block_size=48) as (one, other):
        body = request_body()
        assert ids(await split(one, other, body)) == continuation(body["prompt"], 6, VOCAB)
        assert (computed(other), failures(other)) == (1, {})
        await until_idle(one, other)


async def test_policy_fail_sends_500_before_the_first_byte() -> None:
    async with pair(decode_kv_load_failure_policy="fail") as (one, other):
        body = request_body()
        params = having(remote_engine_id="gone")(await prefilled(one, body))
        for stream in (False, True):
            leg = body | {"kv_transfer_params": params, "stream": stream}
            async with other.http.post(other.url + PATH, json=leg) as reply:
                assert reply.status == 500
                assert "did not come" in await reply.text()
        assert computed(other) == 0
        await eventually(lambda: not other.worker.transfers.importer.active, "its end")
        assert other.worker.pool.used_blocks == 0


async def test_unread_kv_is_freed_when_its_lease_ends() -> None:
    terms = SchedulerSettings(export_lease_s=LEASE_S)
    async with running(scheduler=terms) as one:
        await prefilled(one, request_body())
        exports = one.worker.runner.scheduler.exports
        assert (len(exports), one.worker.pool.used_blocks) == (1, 7)
        await asyncio.sleep(LEASE_S)
        text = (await one.get("/metrics")).decode()
        assert 'kv_exports_ended_total{end="expired",engine="0"' in text.replace(" ", "")
        assert (exports.expired_total, one.worker.pool.used_blocks) == (1, 0)


async def test_a_router_can_release_exported_kv() -> None:
    async with running() as one:
        params = await prefilled(one, request_body())
        body = {
            "request_id": params["remote_request_id"],
            "generation": params["remote_registration_generation"],
        }
        for released in (True, False):
            assert await one.post("/kv/release", body) == (200, {"released": released})
        await until_idle(one)
        for wrong in ({}, body | {"request_id": "x"}, body | {"generation": -1}):
            status, _ = await one.post("/kv/release", wrong)
            assert status == 400


async def test_a_refused_request_frees_its_exported_kv() -> None:
    async with pair(decode_kv_tokens=64) as (one, other):
        params = await prefilled(one, request_body())
        status, _ = await other.post(PATH, request_body() | {"kv_transfer_params": params})
        assert status == 400
        await until_idle(one, other)


async def test_a_lease_lasts_while_its_reader_waits_for_room() -> None:
    """Kept KV outlives its lease while its reader waits for room, here behind a request that fills
    the cache.
    """
    terms = SchedulerSettings(export_lease_s=LEASE_S)
    async with pair(scheduler=terms, decode_kv_tokens=256, speed=1.0) as (one, other):
        params = await prefilled(one, request_body())
        long = request_body(5, 160, 90)
        before = asyncio.create_task(other.post(PATH, long))
        await eventually(lambda: other.worker.runner.scheduler.running == 1, "it runs")
        body = request_body()
        begun_s = asyncio.get_running_loop().time()
        leg = asyncio.create_task(other.post(PATH, body | {"kv_transfer_params": params}))
        while not leg.done():
            await one.get("/metrics")  # ends the leases that are over
            await asyncio.sleep(0.01)
        status, answer = await leg
        assert asyncio.get_running_loop().time() - begun_s > LEASE_S
        assert (status, ids(answer)) == (200, continuation(body["prompt"], 6, VOCAB))
        assert failures(other) == {}
        await before
        await until_idle(one, other)


async def test_a_reader_waits_for_room_for_ten_leases_at_most() -> None:
    """A reader does not wait for room forever: after ten leases the KV is given back, although its
    reader is still there.
    """
    terms = SchedulerSettings(export_lease_s=0.06)
    async with pair(scheduler=terms, decode_kv_tokens=256, speed=1.0) as (one, other):
        params = await prefilled(one, request_body())
        before = asyncio.create_task(other.post(PATH, request_body(5, 160, 90)))
        await eventually(lambda: other.worker.runner.scheduler.running == 1, "it runs")
        leg = asyncio.create_task(other.post(PATH, request_body() | {"kv_transfer_params": params}))
        exports = one.worker.runner.scheduler.exports
        while len(exports):
            await one.get("/metrics")
            await asyncio.sleep(0.01)
        assert other.worker.runner.scheduler.waiting == 1
        status, answer = await leg
        assert (status, ids(answer)) == (200, continuation(request_body()["prompt"], 6, VOCAB))
        assert failures(other) in ({"late": 1}, {"connection": 1})
        await before
        await until_idle(one, other)


async def test_a_request_that_reads_its_kv_has_the_reason_kv_transfer() -> None:
    async with pair(kv_gbytes_per_s=0.01) as (one, other):
        params = await prefilled(one, request_body())
        leg = asyncio.create_task(other.post(PATH, request_body() | {"kv_transfer_params": params}))
        await eventually(lambda: other.worker.runner.scheduler.reading == 1, "it reads")
        (choice,) = other.worker.runner.scheduler.requests.values()
        (told,) = other.worker.explain(next(iter(other.worker._choices.values()))[0].answer_id)
        assert (told.state, told.reason) == ("reading", "kv_transfer")
        assert (told.queue_position, told.request_id) == (None, choice.request_id)
        async with other.http.get(f"{other.url}/health") as reply:
            assert (await reply.json())["waiting_for"] == "kv_transfer"
        leg.cancel()
        await asyncio.gather(leg, return_exceptions=True)
        await until_idle(one, other)


async def test_a_prefix_that_two_requests_need_is_transferred_once() -> None:
    async with pair(kv_gbytes_per_s=0.05) as (one, other):
        trunk = request_body(1, 800)["prompt"]
        bodies = [request_body() | {"prompt": [*trunk, number]} for number in (1, 2)]
        both = [await prefilled(one, body) for body in bodies]
        legs = [body | {"kv_transfer_params": p} for body, p in zip(bodies, both, strict=True)]
        answers = await asyncio.gather(*(other.post(PATH, leg) for leg in legs))
        for body, (_, answer) in zip(bodies, answers, strict=True):
            assert ids(answer) == continuation(body["prompt"], 6, VOCAB)
        assert one.worker.transfers.exporter.sent_bytes_total == 50 * 16 * 131_072
        await until_idle(one, other)


async def test_a_client_that_disconnects_leaves_no_kv_behind() -> None:
    """A client that leaves leaves no KV behind, at any stage: before its turn, during the transfer,
    during decode, or during prefill.
    """
    async with pair(kv_gbytes_per_s=0.01, speed=20.0) as (one, other):
        scheduler = other.worker.runner.scheduler
        importer = other.worker.transfers.importer
        for seed, (part, state) in enumerate(
            ((importer, "active"), (scheduler, "reading"), (scheduler, "running"))
        ):
            body = request_body(seed, 400, 2000)
            params = await prefilled(one, body)
            leg = asyncio.create_task(other.post(PATH, body | {"kv_transfer_params": params}))
            await eventually(lambda of=part, name=state: getattr(of, name) > 0, state)
            leg.cancel()
            await asyncio.gather(leg, return_exceptions=True)
            await until_idle(one, other)
        leg = asyncio.create_task(prefilled(one, request_body(9, 8000)))
        await eventually(lambda: one.worker.runner.scheduler.running > 0, "the first leg")
        leg.cancel()
        await asyncio.gather(leg, return_exceptions=True)
        await until_idle(one, other)


async def test_a_deadline_ends_a_transfer() -> None:
    async with pair(kv_gbytes_per_s=0.01, speed=20.0) as (one, other):
        body = request_body(0, 4000)
        params = await prefilled(one, body)
        headers = {"x-request-timeout-ms": "100"}
        leg = body | {"kv_transfer_params": params}
        async with other.http.post(other.url + PATH, json=leg, headers=headers) as reply:
            assert reply.status == 504
        await until_idle(one, other)


async def test_a_prefill_worker_that_stops_costs_a_prefill() -> None:
    """If the prefill worker stops before or during the transfer, the decode worker computes the
    prompt itself.
    """
    async with running(kv_gbytes_per_s=0.01) as other:
        for wait in (False, True):
            body = request_body(int(wait), 800)
            async with running(kv_gbytes_per_s=0.01) as one:
                params = await prefilled(one, body)
                if wait:
                    leg = asyncio.create_task(
                        other.post(PATH, body | {"kv_transfer_params": params})
                    )
                    reading = other.worker.runner.scheduler
                    await eventually(lambda part=reading: part.reading == 1, "it reads")
            if not wait:
                leg = asyncio.create_task(other.post(PATH, body | {"kv_transfer_params": params}))
            status, answer = await leg
            assert (status, ids(answer)) == (200, continuation(body["prompt"], 6, VOCAB))
        assert failures(other) == {"connection": 2}
        await until_idle(other)


async def connected(worker: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    assert worker.worker.transfers is not None
    return await asyncio.open_connection("127.0.0.1", worker.worker.transfers.exporter.port)


def hello(worker: Running, params: dict[str, Any], prompt: list[int]) -> Hello:
    from engine.transfer import digest
    from tests.engine.scheduling import array

    part = worker.worker.served.store
    assert part is not None
    return Hello(
        params["remote_engine_id"], int(params["remote_request_id"]),
        params["remote_registration_generation"], len(prompt), digest(array(prompt)), part.form,
    )  # fmt: skip


async def test_a_second_reader_is_refused_and_a_dead_reader_frees_the_kv() -> None:
    async with running() as one:
        body = request_body()
        params = await prefilled(one, body)
        stream, writer = await connected(one)
        writer.write(frame(hello(one, params, body["prompt"])))
        assert isinstance(await receive(stream), Welcome)
        second, other = await connected(one)
        other.write(frame(hello(one, params, body["prompt"])))
        refusal = await receive(second)
        assert isinstance(refusal, Refusal)
        assert refusal.reason == "in_use"
        other.close()
        writer.close()
        await until_idle(one)


async def test_a_transfer_that_outlives_its_lease_is_counted_and_not_used() -> None:
    """The reader of KV whose lease ended counts the read as late and computes the prompt itself. If
    a router releases the KV during the read, the answer must not come from another prompt's KV.
    """
    async with pair(kv_gbytes_per_s=0.05) as (one, other):
        body = request_body(0, 1600)
        params = await prefilled(one, body)
        leg = asyncio.create_task(other.post(PATH, body | {"kv_transfer_params": params}))
        exporter = one.worker.transfers.exporter
        await eventually(lambda: len(exporter._lent) == 1, "it is read")
        name = {
            "request_id": params["remote_request_id"],
            "generation": params["remote_registration_generation"],
        }
        assert await one.post("/kv/release", name) == (200, {"released": True})
        status, answer = await leg
        assert (status, ids(answer)) == (200, continuation(body["prompt"], 6, VOCAB))
        assert failures(other) == {"late": 1}
        assert exporter.late_total == 1
        await until_idle(one, other)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x02\x00\x00\x00\xc1\xc1",
        frame(Beat()),
        b"",
    ],
    ids=["http", "long", "rubbish", "beat", "nothing"],
)
async def test_invalid_messages_at_the_kv_port_close_the_connection(said: bytes) -> None:
    async with running() as one:
        stream, writer = await connected(one)
        writer.write(said)
        if not said:
            writer.close()
        async with asyncio.timeout(10):
            assert await stream.read() == b""
        writer.close()
        await until_idle(one)


async def test_a_prefill_worker_that_sends_garbage_costs_a_prefill() -> None:
    answers: list[list[bytes]] = [
        [b"HTTP/1.1 400 Bad Request\r\n\r\n"],
        [frame(Done(True, 0))],
        [frame(Welcome(16, 0.6)), frame(Part(3, 4, 0)), frame(Done(True, 0))],
        [frame(Welcome(16, 0.6)), frame(Done(True, 0))],
        [frame(Welcome(16, 0.6)), frame(Part(0, 7, 2)), b"xx", frame(Done(True, 0))],
        [frame(Welcome(16, 0.6)), frame(Part(0, 7, 2**40))],
        [frame(Welcome(0, 0.6))],
    ]

    given: list[bytes] = []

    async def answer(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await receive(stream)
        writer.write(b"".join(given))
        await stream.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, running() as other, running() as one:
        for number, messages in enumerate(answers):
            given[:] = messages
            body = request_body(number)
            params = having(remote_port=port)(await prefilled(one, body))
            status, said = await other.post(PATH, body | {"kv_transfer_params": params})
            assert (status, ids(said)) == (200, continuation(body["prompt"], 6, VOCAB))
        assert sum(failures(other).values()) == len(answers)
        assert set(failures(other)) <= {"connection", "error"}
        await until_idle(other)


async def test_server_info_shows_role_and_transfer_address() -> None:
    async with running(role="decode", kv_host="10.0.0.9") as one:
        told = await info(one)
        assert (told["role"], told["kv_transfer"]["host"]) == ("decode", "10.0.0.9")
        assert told["kv_transfer"]["layout"]["block_size"] == 16
    async with running(kv_transport="none") as one:
        told = await info(one)
        assert (told["group"], told["kv_transfer"]) == (None, None)
        assert await prefilled(one, request_body()) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"role": "prefil"}, {"kv_transport": "rdma"}, {"kv_gbytes_per_s": 0.0},
        {"kv_latency_ms": -1.0}, {"kv_port": 99_999}, {"kv_load_failure_policy": "retry"},
    ],
    ids=str,
)  # fmt: skip
async def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        async with running(**wrong):
            pass


LIVES = 300 if QUICK else 10_000


async def test_random_transfers_leave_nothing_behind() -> None:
    """Random histories of transfers leave nothing behind and give right answers: clients leave
    during prefill or decode, connections are cut, leases end unread.
    """
    draw = random.Random(7)
    terms = SchedulerSettings(export_lease_s=2.0, max_batch_size=16, max_num_tokens=512)
    turns = asyncio.Semaphore(48)

    async def leg(worker: Running, body: dict[str, Any], leaves: bool) -> Any:
        task = asyncio.create_task(worker.post(PATH, body))
        if leaves:
            await asyncio.sleep(draw.random() * 0.2)
            task.cancel()
        try:
            status, answer = await task
        except (asyncio.CancelledError, aiohttp.ClientError):
            return None
        assert status == 200, answer
        return answer

    async def life(seed: int, one: Running, other: Running) -> str:
        body = request_body(seed % 40, 16 + seed % 300, 1 + seed % 20)
        fate = draw.random()
        async with turns:
            first = body | {"max_tokens": 1, "kv_transfer_params": ASK}
            answer = await leg(one, first, fate < 0.1)
            if answer is None or fate < 0.13:
                return "left"
            second = body | {"kv_transfer_params": answer.get("kv_transfer_params")}
            if fate < 0.2:
                cut_one(one, draw)
            answer = await leg(other, second, fate > 0.85)
        if answer is None:
            return "aborted"
        assert ids(answer) == continuation(body["prompt"], body["max_tokens"], VOCAB)
        return "answered"

    options = {"scheduler": terms, "kv_tokens": 16_384, "kv_gbytes_per_s": 0.1}
    async with pair(**options) as (one, other):
        ends = await asyncio.gather(*(life(seed, one, other) for seed in range(LIVES)))
        print({end: ends.count(end) for end in set(ends)}, failures(other))
        assert ends.count("answered") > LIVES / 2
        assert ends.count("aborted") > LIVES / 30
        await asyncio.sleep(2.0)
        for worker in (one, other):
            await worker.get("/metrics")
        await until_idle(one, other)
        assert other.worker.transfers is not None
        assert other.worker.transfers.importer.received_total > LIVES / 3
        assert not other.worker.pool.used_blocks


def cut_one(worker: Running, draw: random.Random) -> None:
    """Close one connection over which the worker's KV is being read."""
    assert worker.worker.transfers is not None
    readers = sorted(worker.worker.transfers.exporter._readers, key=id)
    if readers:
        draw.choice(readers).cancel()


def test_release_messages_include_their_fields() -> None:
    assert frame(Release()) != frame(Release("x", 1, 2))


CHUNKS = SchedulerSettings(max_num_tokens=512, export_lease_s=LEASE_S)


async def test_kv_is_sent_while_the_rest_is_computed() -> None:
    """KV is sent while the rest of the prompt is computed: if the transfer takes as long as the
    prefill, the first token comes after three fifths of the sum of both.
    """
    chunks = SchedulerSettings(max_num_tokens=512)
    link = {"scheduler": chunks, "speed": 0.3, "kv_gbytes_per_s": 8192 * 131_072 / 0.25 / 1e9}
    times: dict[bool, float] = {}
    for overlap, seed in ((False, 3), (True, 3), (True, 4)):  # other programs use the machine, too
        async with pair(kv_overlap=overlap, **link) as (one, other):
            body, begun_s = request_body(seed, 8192, 1), asyncio.get_running_loop().time()
            answer = await split(one, other, body)
            took_s = asyncio.get_running_loop().time() - begun_s
            times[overlap] = min(took_s, times.get(overlap, took_s))
            assert ids(answer) == continuation(body["prompt"], 1, VOCAB)
            assert failures(other) == {}
            await until_idle(one, other)
    assert times[False] > 1.5, "prefill and transfer, one after the other"
    assert times[True] <= 0.6 * times[False], times


async def test_a_cancelled_early_transfer_stops_the_prefill() -> None:
    async with pair(kv_overlap=True, scheduler=CHUNKS, speed=1.0) as (one, other):
        body = request_body(3, 8192)
        params = await prefilled(one, body)
        scheduler = one.worker.runner.scheduler
        assert scheduler.running == 1
        leg = asyncio.create_task(other.post(PATH, body | {"kv_transfer_params": params}))
        await eventually(lambda: one.worker.transfers.exporter.readers == 1, "its reader")
        leg.cancel()
        await asyncio.gather(leg, return_exceptions=True)
        await until_idle(one, other)
        assert computed(one) < 8192
        assert one.worker.unfinished == 0


async def test_a_prompt_that_fails_during_its_transfer_is_computed_by_the_reader() -> None:
    async with pair(kv_overlap=True, scheduler=CHUNKS, speed=1.0) as (one, other):
        body = request_body(3, 8192)
        params = await prefilled(one, body)
        leg = asyncio.create_task(other.post(PATH, body | {"kv_transfer_params": params}))
        await eventually(lambda: other.worker.runner.scheduler.reading == 1, "it reads")
        one.worker.cut_all()
        status, answer = await leg
        assert (status, ids(answer)) == (200, continuation(body["prompt"], 6, VOCAB))
        # The reader may have asked for the KV just after that.
        assert failures(other) in ({"late": 1}, {"unknown": 1})
        await until_idle(one, other)


async def test_unread_early_kv_is_freed() -> None:
    async with pair(kv_overlap=True, scheduler=CHUNKS, speed=20.0) as (one, _):
        params = await prefilled(one, request_body(3, 8192))
        assert params["remote_num_tokens"] == 8192
        await eventually(lambda: not one.worker.unfinished, "the prompt to be computed")
        assert len(one.worker.runner.scheduler.exports) == 1
        await asyncio.sleep(LEASE_S)
        await one.get("/metrics")
        await until_idle(one)


NAMED = ASK | {"transfer_id": "t-1"}


async def sent(worker: Running, body: dict[str, Any]) -> tuple[Any, Any]:
    """Send a prefill request over a socket that has not read any of the answer; return the socket
    and the worker's exported KV.
    """
    text = json.dumps(body | {"max_tokens": 1, "kv_transfer_params": NAMED}).encode()
    host, port = worker.url.removeprefix("http://").split(":")
    raw = socket.create_connection((host, int(port)))
    raw.setblocking(False)
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
    await asyncio.get_running_loop().sock_sendall(raw, head.encode() + text)
    return raw, worker.worker.runner.scheduler.exports


@pytest.mark.parametrize("overlap", [False, True])
async def test_a_client_that_disconnects_with_an_unread_answer_leaves_no_kv(overlap: bool) -> None:
    async with running(kv_overlap=overlap) as one:
        raw, exports = await sent(one, request_body())
        await eventually(lambda: bool(select.select([raw], [], [], 0)[0]), "the answer")
        assert len(exports) == 1
        raw.close()  # with the answer unread: a reset
        await until_idle(one)
        assert exports.expired_total == 0


async def test_kv_is_kept_if_a_client_disconnects_after_reading_the_answer() -> None:
    async with pair() as (one, other):
        raw, exports = await sent(one, request_body())
        await eventually(lambda: bool(select.select([raw], [], [], 0)[0]), "the answer")
        answer = await asyncio.get_running_loop().sock_recv(raw, 1 << 16)
        raw.close()
        params = json.loads(answer.partition(b"\r\n\r\n")[2])["kv_transfer_params"]
        server = one.worker.transfers
        await eventually(lambda: not server._unread_answers, "the end of the connection")
        assert len(exports) == 1
        status, _ = await other.post(PATH, request_body() | {"kv_transfer_params": params})
        assert status == 200
        await until_idle(one, other)
        assert other.worker.transfers.importer.received_total == 1


async def test_a_client_that_disconnected_before_the_answer_leaves_no_kv() -> None:
    """A client that has disconnected when it is answered leaves no KV behind, although the event
    loop has not noticed its end.
    """
    async with running(speed=1.0) as one:
        raw, exports = await sent(one, request_body(tokens=1_000))
        await eventually(lambda: one.worker.unfinished == 1, "it is computed")
        raw.shutdown(socket.SHUT_WR)
        raw.close()
        await eventually(lambda: one.worker.unfinished == 0, "its end")
        await until_idle(one)
        assert exports.expired_total == 0


async def test_a_router_can_release_kv_without_reading_the_answer() -> None:
    async with running() as one:
        raw, exports = await sent(one, request_body())
        await eventually(lambda: len(exports) == 1, "its KV")
        for released in (True, False):
            body = {"transfer_id": "t-1"}
            assert await one.post("/kv/release", body) == (200, {"released": released})
        raw.close()
        await until_idle(one)


async def test_kv_released_before_it_is_computed_is_not_kept() -> None:
    async with running(speed=0.2) as one:
        raw, exports = await sent(one, request_body(tokens=1_000))
        await eventually(lambda: one.worker.unfinished == 1, "it is computed")
        assert await one.post("/kv/release", {"transfer_id": "t-1"}) == (200, {"released": True})
        await eventually(lambda: one.worker.unfinished == 0, "its end")
        assert (len(exports), exports.kept_total) == (0, 0)
        raw.close()
        await until_idle(one)
