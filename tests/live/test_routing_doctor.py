"""Tests of `warmroute doctor --routing`: it ranks first the cause that a test plants in running
programs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.engine.model_dirs import write_model
from tests.live.commands import output_of
from tests.live.stack import MODEL, Stack, engine_arguments, running, until

HEAD = [1_000 + n for n in range(400)]
TEXT = "The quick brown fox jumps over the lazy dog. " * 40
_HIDDEN = ("/kv_snapshot",)


async def drive(stack: Stack, count: int = 12, head: Sequence[int] = HEAD) -> None:
    """Send requests one after another that share a beginning and differ in their last 39 tokens."""
    for number in range(count):
        status, answer = await stack.complete([*head, *range(number * 50, number * 50 + 39)])
        assert status == 200, answer


async def doctor(stack: Stack, *more: str, seconds: float = 0.2) -> tuple[int, dict[str, Any]]:
    """Run the doctor; return its exit status and report."""
    words = ("doctor", "--routing", stack.admin, "--seconds", str(seconds), "--json", *more)
    status, said = await output_of(*words)
    return status, dict(json.loads(said))


async def first(stack: Stack, *more: str) -> dict[str, Any]:
    """Run the doctor; return the cause that it ranks first."""
    status, report = await doctor(stack, *more)
    assert status == 1, report
    finding: dict[str, Any] = report["findings"][0]
    assert finding["evidence"]
    return finding


async def healthy_after(stack: Stack, count: int = 24, head: Sequence[int] = HEAD) -> None:
    """Send requests that share a beginning, and check that the doctor finds no cause any more."""
    await drive(stack, count, head)
    status, report = await doctor(stack)
    assert (status, report["findings"]) == (0, []), report


@asynccontextmanager
async def one_worker(
    folder: Path, options: str = "", router: Sequence[str] = (), **engine: Any
) -> AsyncIterator[Stack]:
    """Yield a router with one worker, whose `--worker` value has these options."""
    async with running(folder, workers=0, router=router) as stack:
        worker = await stack.programs.start("worker", "engine", engine_arguments(**engine))
        stack.workers.append(worker)
        await stack.add(worker.url + options)
        yield stack


@asynccontextmanager
async def shown_as(stack: Stack, engine: str, settings: str) -> AsyncIterator[str]:
    """Run a proxy in front of an engine that reports other cache settings and no snapshot; yield
    its URL.
    """

    async def passed(request: web.Request) -> web.Response:
        if request.path in _HIDDEN:
            raise web.HTTPNotFound
        body = await request.read()
        url = f"{engine}{request.rel_url}"
        async with stack.http.request(request.method, url, data=body or None) as reply:
            data = await reply.read()
        if request.path == "/metrics":
            data = data.replace(b'enable_prefix_caching="True"', settings.encode())
        return web.Response(status=reply.status, body=data, content_type=reply.content_type)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", passed)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def alone(*urls: str, status: int) -> dict[str, Any]:
    """Run the doctor on engines without a router; check its exit status and return its report."""
    words = [word for url in urls for word in ("--routing", url)]
    code, said = await output_of("doctor", *words, "--seconds", "0.2", "--json")
    assert code == status, said
    return dict(json.loads(said))


async def test_the_doctor_examines_engines_without_a_router(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        urls = [worker.url for worker in stack.workers]
        report = await alone(*urls, status=0)
        assert (report["router"], report["engines"]) == (None, urls)
        assert report["reported_hit_share"] is None
        for number in range(2):  # each engine gets another prompt
            own = [number * 1_000 + n for n in range(400)]
            body = {"model": MODEL, "prompt": own, "max_tokens": 1}
            async with stack.http.post(f"{urls[number]}/v1/completions", json=body) as reply:
                assert reply.status == 200
        report = await alone(*urls, status=1)
        assert [one["cause"] for one in report["findings"]] == ["nothing-shared"]
        await drive(stack)
        report = await alone(*urls, status=0)
        assert report["reported_hit_share"] > 0.3
        async with shown_as(stack, urls[0], 'enable_prefix_caching="False"') as front:
            report = await alone(front, urls[1], status=1)
        assert report["findings"][0]["cause"] == "prefix-caching-off"


async def test_an_address_that_is_neither_router_nor_engine_is_reported(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        for urls in ((stack.url,), (stack.workers[0].url, stack.admin)):
            words = [word for url in urls for word in ("--routing", url)]
            status, said = await output_of("doctor", *words, "--seconds", "0.2")
            assert status == 2
            assert "Give routers alone, or engines alone" in said


async def test_a_healthy_pool_has_no_findings(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        status, report = await doctor(stack)
        assert (status, report["findings"], report["requests"]) == (0, [], 0)
        await drive(stack)
        status, report = await doctor(stack)
        assert (status, report["findings"]) == (0, [])
        assert report["reported_hit_share"] > 0.7


@pytest.mark.parametrize(
    ("options", "cause", "change"),
    [
        (",events=none", "events-not-read", "take events=none out"),
        (",events=tcp://127.0.0.1:9", "events-elsewhere", "events=tcp://127.0.0.1:"),
        (",block_size=32", "block-sizes", "take block_size= out"),
    ],
)
async def test_wrong_worker_options_are_found_until_they_are_corrected(
    tmp_path: Path, options: str, cause: str, change: str
) -> None:
    async with one_worker(tmp_path, options) as stack:
        await drive(stack)
        found = await first(stack)
        assert (found["cause"], change in found["change"]) == (cause, True), found
        await stack.remove(0)
        await stack.add(stack.workers[0].url)
        await healthy_after(stack, 12)


async def test_events_of_another_engine_are_found(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as stack:
        other = await stack.programs.start("other", "engine", engine_arguments())
        async with stack.http.get(f"{stack.workers[0].url}/kv_event_sources") as reply:
            endpoint = (await reply.json())["0"]["endpoint"]
        await stack.remove(0)
        await stack.add(f"{other.url},events={endpoint}")
        await drive(stack)
        found = await first(stack)
        assert (found["cause"], endpoint in found["evidence"][0]["figure"]) == (
            "events-elsewhere",
            True,
        )
        await stack.remove(1)
        await stack.add(other.url)
        await healthy_after(stack)


async def test_disabled_prefix_caching_and_missing_events_are_found(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as stack:
        worker = stack.workers[0].url
        async with shown_as(stack, worker, 'enable_prefix_caching="False"') as front:
            await stack.remove(0)
            await stack.add(f"{front},events=none")
            await drive(stack)
            found = await first(stack)
            assert (found["cause"], found["weight"]) == ("prefix-caching-off", 1.0)
        await stack.remove(1)
        await stack.add(worker)
        await healthy_after(stack)


async def test_a_missing_tokenizer_is_found(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2) as stack:
        for number in range(8):
            status, answer = await stack.complete(f"{number} {TEXT}")
            assert status == 200, answer
        assert (await first(stack))["cause"] == "no-tokenizer"


@pytest.mark.parametrize("cause", ["tokenizer-differs", "template-differs"])
async def test_another_tokenizer_or_template_than_the_engines_is_found(
    tmp_path: Path, cause: str
) -> None:
    own, engines = (write_model(tmp_path / name) for name in ("own", "engines"))
    if cause == "tokenizer-differs":
        tokenizer = json.loads((own / "tokenizer.json").read_text())
        tokenizer["pre_tokenizer"]["add_prefix_space"] = True
        (own / "tokenizer.json").write_text(json.dumps(tokenizer))
    else:
        config = json.loads((own / "tokenizer_config.json").read_text())
        config["chat_template"] = "{{ bos_token }}Today is Monday. " + config["chat_template"]
        (own / "tokenizer_config.json").write_text(json.dumps(config))
    router = ["--tokenizer", str(own)]
    async with one_worker(tmp_path, router=router, tokenizer=engines) as stack:

        async def differs() -> bool:
            return await stack.metric("warmroute_tokenizer_mismatch_total") > 0

        await until(differs, "the check of the tokens")
        await stack.complete(TEXT)
        assert (await first(stack))["cause"] == "tokens-differ"
        assert (await first(stack, "--tokenizer", str(own)))["cause"] == cause


async def test_the_engines_own_tokenizer_gives_no_finding(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    router = ["--tokenizer", str(folder)]
    async with one_worker(tmp_path, router=router, tokenizer=folder) as stack:
        for number in range(10):
            await stack.complete(f"{TEXT} {number}")
        status, report = await doctor(stack, "--tokenizer", str(folder))
        assert (status, report["findings"]) == (0, []), report


async def test_prompts_with_unique_salts_or_beginnings_are_found(tmp_path: Path) -> None:
    bodies = tmp_path / "bodies.jsonl"
    async with running(tmp_path) as stack:
        salted = [{"prompt": HEAD, "cache_salt": f"salt-{n}"} for n in range(10)]
        headed = [{"prompt": [n + 1, n + 60, *HEAD]} for n in range(10)]
        for sent, cause in ((salted, "salts"), (headed, "heads-differ")):
            for body in sent:
                status, answer = await stack.complete(**body)
                assert status == 200, answer
            bodies.write_text("".join(json.dumps(body) + "\n" for body in sent))
            if cause == "salts":
                assert (await first(stack))["cause"] == "nothing-shared"
            assert (await first(stack, "--requests", str(bodies)))["cause"] == cause
        mended = [{"prompt": [*HEAD, n + 1, n + 60], "cache_salt": "all"} for n in range(20)]
        for body in mended:
            await stack.complete(**body)
        bodies.write_text("".join(json.dumps(body) + "\n" for body in mended))
        status, report = await doctor(stack, "--requests", str(bodies))
        assert (status, report["findings"]) == (0, []), report


async def test_prompts_shorter_than_a_block_are_found(tmp_path: Path) -> None:
    async with one_worker(tmp_path, **{"block-size": 512}) as stack:
        await drive(stack)
        assert (await first(stack))["cause"] == "short-prompts"
        await healthy_after(stack, head=range(1_000, 2_500))


async def decides_by(stack: Stack, policy: str) -> bool:
    async with stack.http.get(f"{stack.admin}/policy") as reply:
        return policy in await reply.text()


async def test_a_policy_that_ignores_caches_is_found(tmp_path: Path) -> None:
    config = tmp_path / "router.yaml"
    config.write_text("policy: round_robin\n")
    async with running(tmp_path, workers=2, router=["--config", str(config)]) as stack:
        for number in range(10):
            for _ in range(2):
                await stack.complete([number + 1, *HEAD])
                await asyncio.sleep(0.05)
        assert (await first(stack))["cause"] == "policy-blind"
        config.write_text("policy: warmset\n")
        stack.router.process.send_signal(signal.SIGHUP)
        await until(lambda: decides_by(stack, "warmset"), "the other policy")
        await healthy_after(stack)


async def test_a_too_small_index_of_the_router_is_found(tmp_path: Path) -> None:
    config = tmp_path / "router.yaml"
    config.write_text("limits: {index_entries: 1024}\n")
    async with running(tmp_path, router=["--config", str(config)]) as stack:
        for number in range(70):
            await stack.complete([number + 1, *HEAD])
        assert (await first(stack))["cause"] == "index-too-small"


async def test_a_too_small_cache_is_found(tmp_path: Path) -> None:
    """The doctor finds that the cache is too small for the active sessions; the sessions continue
    meanwhile, because ended ones need no cache.
    """

    async def go_on(stack: Stack) -> None:
        for number in itertools.cycle(range(6)):
            status, answer = await stack.complete([number + 1, *HEAD], user=f"u{number}")
            assert status == 200, answer

    async with one_worker(tmp_path, **{"kv-tokens": 1_024}) as stack:
        sessions = asyncio.create_task(go_on(stack))
        try:
            assert (await first(stack))["cause"] == "cache-too-small"
        finally:
            sessions.cancel()


async def test_requests_that_bypass_the_router_are_found(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        await drive(stack)

        async def by(number: int) -> None:
            body = {"model": MODEL, "prompt": [number, *HEAD], "max_tokens": 2}
            url = f"{stack.workers[0].url}/v1/completions"
            async with aiohttp.ClientSession() as http, http.post(url, json=body) as reply:
                assert reply.status == 200

        asked = asyncio.create_task(doctor(stack, seconds=3.0))
        for number in range(20):
            await by(number)
            await asyncio.sleep(0.1)
        status, report = await asked
        assert (status, report["findings"][0]["cause"]) == (1, "passed-by"), report
        assert (await doctor(stack))[0] == 0


async def test_two_routers_without_shared_state_are_found(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as stack:
        arguments = ["serve", "--port", "0", "--admin-port", "0"]
        arguments += ["--worker", stack.workers[0].url]
        other = await stack.programs.start("other", "router", arguments)
        await drive(stack)
        found = await first(stack, "--routing", other.facts["admin"])
        assert found["cause"] == "routers-apart"


async def test_an_invalid_or_unreachable_address_is_reported_in_one_line(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as stack:
        for words, says in (
            (("--routing", "http://127.0.0.1:9"), "cannot connect"),
            (("--routing", "x"), "is no URL"),
            (("--routing", stack.url), "is it the admin port?"),
            (("--routing", stack.admin, "http://gpu1:8000"), "URL is nothing for --routing"),
            (("--routing", stack.admin, "--probe"), "--probe is nothing for --routing"),
            (("--routing", stack.admin, "--requests", "/none"), "No such file"),
            (("--routing", stack.admin, "--tokenizer", "/none"), "--tokenizer: "),
            ((stack.workers[0].url, "--tokenizer", "/none"), "--tokenizer needs --routing"),
            (("--routing", stack.admin, "--admin-key-file", "/none"), "No such file"),
            (("--routing", stack.admin, "--seconds", "0"), "cannot be watched"),
        ):
            status, said = await output_of("doctor", *words)
            assert (status, said.count("\n"), said[:7]) == (2, 1, "error: "), said
            assert says in said
