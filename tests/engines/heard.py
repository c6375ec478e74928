"""Checks that a router receives a real server's KV events, also after its connection was cut."""

from __future__ import annotations

from tests.engines.pool import Pool
from tests.engines.vllm_server import BLOCK_SIZE, MODEL
from tests.live.kv_views import cut_line
from tests.live.stack import Stack, until

BLOCKS = 10  # of a prompt


def prompt(serial: int, blocks: int = BLOCKS) -> list[int]:
    """Return token ids that no other test uses: `blocks` whole blocks and one token more."""
    tokens = blocks * BLOCK_SIZE + 1
    return [3 + (serial * 977 + n * 31) % 4000 for n in range(tokens)]


async def hit_blocks(stack: Stack, tokens: list[int]) -> list[int]:
    """Return for each worker how many blocks of a prompt the router expects to find cached."""
    body = {"model": MODEL, "prompt": tokens, "max_tokens": 1}
    best: list[dict[str, int]] = []

    async def decided() -> bool:
        """Return whether the router would dispatch the prompt now; it may hold a request while an
        engine is busy.
        """
        async with stack.http.post(f"{stack.admin}/explain", json=body) as reply:
            assert reply.status == 200, await reply.text()
            best[:] = (await reply.json())["best"]
        return all("hit_tokens" in one for one in best)

    await until(decided, "a decision")
    ranked = sorted(best, key=lambda one: one["worker"])
    return [one["hit_tokens"] // BLOCK_SIZE for one in ranked]


async def warmed(vllm: Pool, serial: int, worker: int) -> list[int]:
    """Send a prompt directly to this worker and wait until the router knows its blocks from events;
    return the prompt.
    """
    tokens = prompt(serial)
    body = {"model": MODEL, "prompt": tokens, "max_tokens": 1}
    status, answer = await vllm.servers[worker].post("/v1/completions", body)
    assert status == 200, answer

    async def known() -> bool:
        return (await hit_blocks(vllm.router, tokens))[worker] == BLOCKS

    await until(known, f"worker {worker} to be known to hold the prompt")
    return tokens


async def until_events_resume(pool: Pool) -> None:
    """Cut and restore a new router's connection to a server's events, and wait until a replay has
    filled the gap.
    """
    server, router = pool.servers[0], pool.router
    live, replay = server.events
    async with cut_line(live) as (port, set_live), cut_line(replay) as (asked, set_replay):
        spec = f"{server.url},events=tcp://127.0.0.1:{port},replay=tcp://127.0.0.1:{asked}"
        arguments = ["serve", "--port", "0", "--admin-port", "0", "--worker", spec]
        second = await router.programs.start("cut-off", "router", arguments)
        stack = Stack(router.programs, second, [], router.http)
        await stack.until_state(0, "ready")

        async def known(wanted: bool) -> None:
            async def shown() -> bool:
                return bool((await stack.row(0))["kv_known"]) is wanted

            await until(shown, f"kv_known {wanted}")

        first = await warmed(pool, 19, 0)

        async def heard() -> bool:  # a line without traffic cannot be lost
            return await hit_blocks(stack, first) == [BLOCKS]

        await until(heard, "the events to be heard by the second router")
        await known(True)
        await set_replay(False)  # otherwise a replay it asked for when it joined may still come
        await set_live(False)
        await known(False)
        assert (await stack.row(0))["events_from"] == "connection lost"
        tokens = await warmed(pool, 20, 0)
        assert await hit_blocks(stack, tokens) == [0]
        await set_replay(True)
        await set_live(True)
        await known(True)
        assert await hit_blocks(stack, tokens) == [BLOCKS]
        second.process.terminate()
        await second.process.wait()
