"""Tests of agents whose client sends one `prompt_cache_key` for all of them, at engines with caches
for half of their conversations.

Two clients each run a main agent and five sub-agents at two engines. The router must count each
agent as its own session, and find the sub-agents' caches as well as if the client told the agents
apart.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.live.stack import Stack, running, until

BLOCK, WORKERS = 16, 2
GROUPS, CHILDREN = 2, 5
MAIN_TOKENS, CHILD_TOKENS, GROWTH_TOKENS = 2_000, 500, 8
WANTED_TOKENS = GROUPS * (MAIN_TOKENS + CHILDREN * CHILD_TOKENS)
KV_TOKENS = WANTED_TOKENS // 2 // WORKERS // BLOCK * BLOCK  # of each worker
ROUNDS, TURNS_IN_A_ROW = 3, 4


@dataclass
class Agent:
    """One agent's conversation, whose prompt shares no beginning with other agents' prompts.
    Lifetime: test.
    """

    group: int
    number: int  # 0: the main agent
    prompt: list[int]
    prompt_tokens: int = 0  # of all its requests
    cached_tokens: int = 0  # of these, by the workers' count
    ids: dict[str, str] = field(default_factory=dict)  # as its client sends them

    async def turn(self, stack: Stack, random: Random) -> None:
        self.prompt += [random.randrange(30_000) for _ in range(GROWTH_TOKENS)]
        status, answer = await stack.complete(self.prompt, **self.ids)
        assert status == 200, answer
        self.prompt_tokens += answer["usage"]["prompt_tokens"]
        self.cached_tokens += answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def agents_of(random: Random, shared: bool) -> list[Agent]:
    """Return the agents. If `shared` is true, the agents of a group have the same key, otherwise
    each has its own.
    """
    agents = []
    for group in range(GROUPS):
        for number in range(CHILDREN + 1):
            tokens = CHILD_TOKENS if number else MAIN_TOKENS
            agent = Agent(group, number, [random.randrange(30_000) for _ in range(tokens)])
            agent.ids["prompt_cache_key"] = f"group {group}"
            if not shared:
                agent.ids["prompt_cache_key"] += f", agent {number}"
                agent.ids["session_id"] = agent.ids["prompt_cache_key"]
            agents.append(agent)
    return agents


@asynccontextmanager
async def all_at_once(stack: Stack, agents: list[Agent]) -> AsyncIterator[None]:
    """Freeze the workers during the block, with one request of each agent in flight at them."""

    async def all_in_flight() -> bool:
        return sum(row["inflight_requests"] for row in await stack.rows()) == len(agents)

    for worker in stack.workers:
        worker.process.send_signal(signal.SIGSTOP)
    requests = [asyncio.create_task(stack.complete(a.prompt, **a.ids)) for a in agents]
    try:
        await until(all_in_flight, "a request of each agent at a worker")
        yield
    finally:
        for worker in stack.workers:
            worker.process.send_signal(signal.SIGCONT)
        await asyncio.gather(*requests)


async def hit_tokens(log_dir: Path, shared: bool) -> tuple[int, int]:
    """Run all conversations; return (cached tokens, prompt tokens) of the sub-agents. Checks the
    router's counts of sessions and tokens.
    """
    random = Random(1)
    agents = agents_of(random, shared)
    engine = {"kv-tokens": KV_TOKENS, "block-size": BLOCK, "speed": 1}
    async with running(log_dir, workers=WORKERS, **engine) as stack:
        async with all_at_once(stack, agents):
            wanted = sum(row["working_set_tokens"] for row in await stack.rows())
            assert wanted == WANTED_TOKENS
        for _ in range(ROUNDS):
            for group in random.sample(range(GROUPS), GROUPS):
                main, *children = (agent for agent in agents if agent.group == group)
                await main.turn(stack, random)
                for _ in range(TURNS_IN_A_ROW):
                    await asyncio.gather(*(child.turn(stack, random) for child in children))
        assert await stack.metric("warmroute_sessions") == len(agents)
    children = [agent for agent in agents if agent.number]
    return sum(a.cached_tokens for a in children), sum(a.prompt_tokens for a in children)


async def test_one_session_key_for_a_group_of_agents_costs_no_hits(tmp_path: Path) -> None:
    own, prompts = await hit_tokens(tmp_path, shared=False)
    shared, _ = await hit_tokens(tmp_path, shared=True)
    print(f"cached of {prompts} prompt tokens: an id each {own}, one key {shared}")
    assert 0 < own < prompts - WANTED_TOKENS, "the caches are too small, or too large, to tell"
    assert shared >= 0.9 * own
