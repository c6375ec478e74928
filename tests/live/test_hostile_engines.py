"""Tests of a router whose engines report false facts about their caches, ranks or events."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.live.hostile.liar import Prompts, lying
from tests.live.stack import Stack, running, until

ANSWERS = 16  # answers by which an engine is judged, as in docs/operations.md


async def log_of(stack: Stack) -> str:
    return await asyncio.to_thread(stack.router.log.read_text)


async def test_a_worker_that_claims_every_prompt_without_hits_loses_its_extra_load(
    tmp_path: Path,
) -> None:
    """A worker that claims to hold every prompt but reports no hits gets all requests at first;
    later, prompts go to the worker that has computed them.
    """
    prompts = Prompts(tokens=256)
    claimed = [prompts.next() for _ in range(2 * ANSWERS)]
    policy = ("--policy", "kv_prefix")
    async with running(tmp_path, workers=1, router=policy) as stack, lying(blocks=10_000) as liar:
        warm = [prompts.next() for _ in range(4)]
        for prompt in warm:
            status, _ = await stack.complete(prompt)
            assert status == 200
        liar.cached = lambda prompt: 0
        number = await stack.add(liar.url)
        await liar.subscribed()
        await liar.claim(*claimed, *(prompt + [1] * 64 for prompt in warm))

        async def blocks_are_known() -> bool:
            return bool((await stack.row(number))["resident_blocks"] >= 16 * len(claimed))

        await until(blocks_are_known, "the liar's events")
        longer = [prompt + [1] * 64 for prompt in warm]
        for prompt in longer:  # it claims longer parts of them than the honest worker holds
            await stack.complete(prompt)
        assert liar.answered == len(longer)
        for prompt in claimed:
            if liar.answered == ANSWERS:
                break
            await stack.complete(prompt)
        await stack.assert_idle()  # until the last answer has been counted, too
        assert (await stack.row(number))["hit_confidence"] == 0.0
        for prompt in longer:
            _, answer = await stack.complete(prompt)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 240
        assert liar.answered == ANSWERS
        assert await stack.metric("warmroute_worker_hit_confidence") == 1.0  # of the honest one
        line = rf"worker {number} \(http://\S+\): answers keep finding less than its KV events"
        assert re.search(line, await log_of(stack))
        question = {"model": "tiny", "prompt": claimed[-1]}
        async with stack.http.post(f"{stack.admin}/explain", json=question) as reply:
            seen = {row["worker"]: row["columns"] for row in (await reply.json())["workers"]}
        assert (seen[number]["hit_confidence"], seen[number]["hit_tokens"]) == (0.0, 0)
        assert seen[0]["hit_confidence"] == 1.0

        await liar.clear()  # it tells the truth from here on
        liar.cached = lambda prompt: len(prompt) - 16

        async def forgiven() -> bool:
            return bool((await stack.row(number))["hit_confidence"] == 1.0)

        await until(forgiven, "the liar to be believed again")
        await liar.claim(*claimed)
        await until(blocks_are_known, "its events")
        before = liar.answered
        for prompt in claimed:
            await stack.complete(prompt)
        assert liar.answered == before + len(claimed)
        assert await forgiven()


async def test_events_count_in_full_for_a_worker_that_reports_no_cached_tokens(
    tmp_path: Path,
) -> None:
    prompts = Prompts(tokens=256)
    claimed = [prompts.next() for _ in range(2 * ANSWERS)]
    async with running(tmp_path, workers=1) as stack, lying(blocks=10_000) as silent:
        silent.cached = lambda prompt: None  # type: ignore[assignment, return-value]
        number = await stack.add(silent.url)
        await silent.subscribed()
        await silent.claim(*claimed)

        async def blocks_are_known() -> bool:
            return bool((await stack.row(number))["resident_blocks"] == 16 * len(claimed))

        await until(blocks_are_known, "its events")
        for prompt in claimed:
            await stack.complete(prompt)
        assert silent.answered > ANSWERS
        assert (await stack.row(number))["hit_confidence"] == 1.0


async def test_prompt_logprobs_requests_do_not_lower_confidence_in_events(
    tmp_path: Path,
) -> None:
    """Requests for log-probabilities of the prompt, for which vLLM skips its cache, do not lower
    the confidence in a worker's events.
    """
    prompts = Prompts(tokens=256)
    claimed = [prompts.next() for _ in range(2 * ANSWERS)]
    async with running(tmp_path, workers=0) as stack, lying(blocks=10_000) as honest:
        honest.cached = lambda prompt: 0
        number = await stack.add(honest.url)
        await honest.subscribed()
        await honest.claim(*claimed)

        async def blocks_are_known() -> bool:
            return bool((await stack.row(number))["resident_blocks"] == 16 * len(claimed))

        await until(blocks_are_known, "its events")
        for prompt in claimed:
            await stack.complete(prompt, prompt_logprobs=1)
        assert (await stack.row(number))["hit_confidence"] == 1.0


async def test_a_worker_that_claims_too_many_blocks_gets_as_many_as_fit(
    tmp_path: Path,
) -> None:
    """A worker that claims a million blocks gets only as many as fit, and other workers' blocks
    stay known.
    """
    flags = ("--limits-index-entries", "20000")
    async with running(tmp_path, workers=1, router=flags) as stack:
        honest = Prompts(tokens=256).next()
        await stack.complete(honest)

        async def kept() -> bool:
            return bool((await stack.row(0))["resident_blocks"] == 16)

        await until(kept, "the honest worker's events")
        async with lying(blocks=1_000, block_size=1) as liar:
            number = await stack.add(liar.url)
            await liar.subscribed()
            for batch in range(1_000):  # a million blocks
                await liar.claim(range(1_000 * batch, 1_000 * (batch + 1)))
                if batch % 50 == 0:
                    assert (await stack.row(number))["resident_blocks"] <= 1_250
            await liar.claim(range(1_000_000, 2_000_000))  # another million in one batch

            async def all_read() -> bool:  # every second batch is too many, and the last one
                return bool((await stack.row(number))["kv_overflows"] == 501)

            await until(all_read, "all its events")
            assert (await stack.row(number))["resident_blocks"] <= 1_250
            log = await log_of(stack)
            line = rf"worker {number} \(http://\S+\): its KV events tell of more blocks than it has"
            assert re.search(f"{line} room for", log)
            assert await kept()
            assert await stack.metric("warmroute_index_evicted_blocks_total") == 0


@pytest.mark.parametrize("elsewhere", ["tcp://127.0.0.2", "ipc"])
async def test_events_from_another_host_are_read_only_if_the_operator_allows_it(
    tmp_path: Path, elsewhere: str
) -> None:
    at = f"ipc://{tmp_path}/events" if elsewhere == "ipc" else elsewhere
    prompt = Prompts(tokens=256).next()
    async with lying(at) as liar:
        connected = asyncio.create_task(liar.subscribed())
        async with running(tmp_path / "refused", workers=0) as stack:
            row = await stack.row(await stack.add(liar.url))
            assert (row["events"], row["kv_known"]) == (None, False)
            assert row["advice"].startswith(f"it names {liar.endpoint!r} for its KV events")
            assert "which is not its own host: not read" in await log_of(stack)
            await stack.complete(prompt)  # it still serves
            assert liar.answered == 1
        assert not connected.done()
        allowed = ("--event-hosts", "ipc" if elsewhere == "ipc" else "127.0.0.0/30")
        async with running(tmp_path / "allowed", workers=0, router=allowed) as stack:
            number = await stack.add(liar.url)
            row = await stack.row(number)
            assert (row["events"], row["advice"]) == (liar.endpoint, None)
            await connected
            await liar.claim(prompt)

            async def read() -> bool:
                return bool((await stack.row(number))["resident_blocks"] == 16)

            await until(read, "its events")


async def test_an_engine_with_thousands_of_ranks_gets_at_most_the_limit_of_ranks(
    tmp_path: Path,
) -> None:
    flags = ("--limits-workers", "64", "--limits-ranks", "8")
    async with running(tmp_path, workers=1, router=flags) as stack, lying(ranks=4_000) as liar:
        await stack.add(liar.url)

        async def joined() -> bool:
            return sum(row["state"] == "ready" for row in await stack.rows()) == 9

        await until(joined, "its share of ranks")
        rows = [row for row in await stack.rows() if row["url"] == liar.url]
        assert sorted(row["rank"] for row in rows) == list(range(8))
        assert {row["refused_ranks"] for row in rows} == {3_992}
        assert await stack.metric("warmroute_refused_ranks") == 3_992
        told = f"{liar.url}: not all of its 4000 ranks: at most 8 of one URL become workers"
        assert (await log_of(stack)).count(told) == 1
        async with lying() as other:  # there is room for other workers
            await stack.add(other.url)
