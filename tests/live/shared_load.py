"""Clients whose prompts share prefixes, grow turn by turn and carry cache salts; some clients give
up early.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from tests.live.stack import MODEL
from tests.told_decision import decision_in

TRUNKS = 10
TURNS = 6
SALTS = (None, None, None, "red", "blue")


def trunk_prompt(trunk: int) -> list[int]:
    """Return a common prefix of many prompts, which is at least 10 blocks long."""
    return [trunk * 1000 + i for i in range(160 + 32 * trunk)]


@dataclass
class Load:
    """Counts the answers that clients got, and how often the router's expected hits were right.
    Lifetime: test.
    """

    url: Callable[[], str]
    rng: random.Random
    clients: int = 8
    served: int = 0
    met: Counter[str] = field(default_factory=Counter)
    _running: asyncio.Event = field(default_factory=asyncio.Event)
    _busy: int = 0
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self) -> None:
        self._running.set()
        self._tasks = [
            asyncio.create_task(self._client(random.Random(self.rng.random())))
            for _ in range(self.clients)
        ]

    def resume(self) -> None:
        self._running.set()

    def pause(self) -> None:
        """Stop sending new requests; the event `idle` is set when the last one has ended."""
        self._running.clear()

    @property
    def idle(self) -> bool:
        return self._busy == 0

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if not isinstance(result, asyncio.CancelledError) and result is not None:
                raise result

    async def _client(self, rng: random.Random) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
            while True:
                trunk = min(rng.randrange(TRUNKS), rng.randrange(TRUNKS))  # some are more popular
                prompt = trunk_prompt(trunk)
                salt = rng.choice(SALTS)
                for _ in range(rng.randint(1, TURNS)):
                    prompt += [rng.randrange(30_000) for _ in range(rng.randint(1, 120))]
                    await self._running.wait()
                    self._busy += 1
                    try:
                        await self._ask(http, rng, prompt, salt)
                    except (aiohttp.ClientError, TimeoutError) as error:
                        self.met[type(error).__name__] += 1
                        await asyncio.sleep(0.05)  # the router is away
                    finally:
                        self._busy -= 1

    async def _ask(
        self, http: aiohttp.ClientSession, rng: random.Random, prompt: list[int], salt: str | None
    ) -> None:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": rng.randint(1, 40),
            "stream": rng.random() < 0.5,
        } | ({} if salt is None else {"cache_salt": salt})
        headers = {"x-warmroute-explain": "1"}
        async with http.post(f"{self.url()}/v1/completions", json=body, headers=headers) as reply:
            if reply.status != 200:
                self.met[f"status {reply.status}"] += 1
                await reply.read()
                return
            if body["stream"]:
                if rng.random() < 0.3:  # given up after its first bytes
                    await reply.content.readany()
                    self.met["given up"] += 1
                    reply.close()
                    return
                await reply.read()
                self.served += 1
                return
            usage = (await reply.json())["usage"]
            self.served += 1
            expected = decision_in(reply.headers["x-warmroute-explain"])["expected_hit_tokens"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            sign = (expected > cached) - (expected < cached)
            self.met[("hit as expected", "hit below expected", "hit above expected")[sign]] += 1
