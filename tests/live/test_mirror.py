"""Tests of a worker without events whose cache is much smaller than the router was told, so that
the router has to learn it.
"""

from __future__ import annotations

import random
from pathlib import Path

from tests.live.kv_views import explained
from tests.live.stack import engine_arguments, running

BLOCK = 16
REAL_TOKENS = 200 * BLOCK
PROMPT_BLOCKS = 12


def prompts(count: int) -> list[list[int]]:
    """Return prompts that begin with one of a few documents, hot ones more often, and end in unique
    tokens.
    """
    rng = random.Random(4)
    drawn = []
    for number in range(count):
        document = min(int(rng.expovariate(0.12)), 39)
        start = 1000 + 500 * document
        drawn.append([*range(start, start + PROMPT_BLOCKS * BLOCK), 7, number])
    return drawn


async def test_a_smaller_cache_than_configured_is_learned_from_answers(tmp_path: Path) -> None:
    async with running(tmp_path, workers=0) as stack:
        arguments = engine_arguments(speed=200, **{"kv-tokens": REAL_TOKENS})
        worker = await stack.programs.start("plain", "engine", arguments)
        told = f"block_size={BLOCK},kv_tokens={5 * REAL_TOKENS}"
        await stack.add(f"{worker.url},kind=openai,events=none,{told}")
        answers = [await explained(stack, prompt) for prompt in prompts(500)]
        early, late = answers[:100], answers[250:]
        wrong = [a for a in late if abs(a["expected"] - a["cached"]) > BLOCK]
        assert len(wrong) < 0.1 * len(late), wrong
        assert any(a["expected"] > a["cached"] + BLOCK for a in early + answers[100:250])
        assert sum(a["cached"] > 0 for a in late) > 0.3 * len(late)  # the cache is not cold
        fewer = await stack.metric('warmroute_mirror_corrections_total{found="fewer"}')
        assert fewer > 0
        assert await stack.metric("warmroute_mirrored_blocks") > 0
