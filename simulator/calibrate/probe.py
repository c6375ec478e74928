"""Measures a live engine through its OpenAI port: single prefills of many lengths, and steady
decodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

import aiohttp
import msgspec

from simulator.calibrate.fit import ComputedLoad, Observation, ObservationError, prefill_loads

LEAST_STEPS = 16  # side by side, or a decode measurement says too little
TIMEOUT_S = 300.0
ERROR_BYTES = 300
FIRST_TOKEN_ID = 1_000  # below lie the special tokens of most vocabularies


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The engine to measure; no other client should use it meanwhile. Lifetime: measurement."""

    url: str  # base address, as http://127.0.0.1:8000
    model: str
    chunk_tokens: int = 8192  # prefill tokens that its steps take at most
    max_prompt_tokens: int = 16384
    vocabulary: int = 10_000
    speed: float = 1.0  # of a timed worker: measured times are multiplied by it


@dataclass(frozen=True, slots=True)
class Course:
    """The measurements to make. Batch size and context length of the decodes must vary
    independently.
    """

    prefill_tokens: tuple[int, ...] = (128, 512, 1024, 2048, 4096, 8192, 12288, 16384)
    prefill_repeats: int = 3
    decodes: tuple[tuple[int, int], ...] = (  # streams at once, prompt tokens of each
        (1, 128), (1, 8192), (4, 512), (8, 4096), (16, 256), (32, 1024), (64, 128), (64, 512),
    )  # fmt: skip
    output_tokens: int = 256  # of a decode: all streams must run side by side for a while


async def probe(
    endpoint: Endpoint,
    seed: int,
    on_done: Callable[[int, int], None] = lambda done, of: None,
    course: Course = Course(),
) -> list[Observation]:
    """Return the measured times of the prefills and decodes of `course` at the endpoint, as far as
    it accepts them.

    Prompts are random tokens that no cache holds. `on_done` gets the number of finished
    measurements. Raises `ObservationError` if the endpoint does not answer as it should.
    """
    longest = endpoint.max_prompt_tokens
    prefills = [n for n in course.prefill_tokens if n <= longest] * course.prefill_repeats
    decodes = [(streams, tokens) for streams, tokens in course.decodes if tokens <= longest]
    total = len(prefills) + len(decodes)
    found: list[Observation] = []
    async with _Prober(endpoint, Random(seed)) as prober:
        await prober.streams([64], 1)  # the first request of all warms connections and code
        for tokens in prefills:
            found.append(await prober.prefill(tokens))
            on_done(len(found), total)
        for streams, tokens in decodes:
            found.append(await prober.decode(streams, tokens, course.output_tokens))
            on_done(len(found), total)
    return found


class _Prober:
    """Measures an endpoint through one HTTP session. Lifetime: measurement."""

    def __init__(self, endpoint: Endpoint, random: Random) -> None:
        self._endpoint = endpoint
        self._random = random

    async def __aenter__(self) -> _Prober:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=10.0),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def prefill(self, tokens: int) -> Observation:
        """Measure one prompt that is sent alone; return the time to its first token as an
        observation.
        """
        started_s = _now_s()
        (times_s,) = await self.streams([tokens], 1)
        seconds = (times_s[0] - started_s) * self._endpoint.speed
        return Observation(prefill_loads(tokens, self._endpoint.chunk_tokens), seconds, 1)

    async def decode(self, streams: int, tokens: int, output_tokens: int) -> Observation:
        """Measure decoding while all `streams` decode and nothing is prefilled; return the time
        between tokens as an observation.
        """
        times_s = await self.streams([tokens] * streams, output_tokens)
        first_s = max(times[0] for times in times_s)
        last_s = min(times[-1] for times in times_s)
        inside = [[t for t in times if first_s <= t <= last_s] for times in times_s]
        if min(map(len, inside)) < LEAST_STEPS:
            raise ObservationError(
                f"{streams} streams of {tokens} prompt tokens hardly ran side by side: is "
                f"{self._endpoint.url} used by others, or its batch smaller than {streams}?"
            )
        # Each stream's own mean gap; tokens may come in bursts, so single gaps say less.
        gaps_s = [(times[-1] - times[0]) / (len(times) - 1) for times in inside]
        before = [sum(t < (first_s + last_s) / 2 for t in times) for times in times_s]
        load = ComputedLoad(decode_seqs=streams, decode_ctx_tokens=streams * tokens + sum(before))
        return Observation((load,), median(gaps_s) * self._endpoint.speed)

    async def streams(self, prompts: Sequence[int], output_tokens: int) -> list[list[float]]:
        """Send prompts of these lengths at once; return the times of the tokens of each."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._stream(n, output_tokens)) for n in prompts]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return [task.result() for task in tasks]

    async def _stream(self, prompt_tokens: int, output_tokens: int) -> list[float]:
        endpoint = self._endpoint
        span = range(FIRST_TOKEN_ID, endpoint.vocabulary)
        body = {
            "model": endpoint.model,
            "prompt": self._random.choices(span, k=prompt_tokens),
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        url = f"{endpoint.url}/v1/completions"
        headers = {"content-type": "application/json"}
        try:
            async with self._session.post(
                url, data=msgspec.json.encode(body), headers=headers
            ) as reply:
                if reply.status != 200:
                    text = (await reply.content.read(ERROR_BYTES)).decode(errors="replace")
                    raise ObservationError(f"{url}: HTTP {reply.status}: {text}")
                times_s = [time_s async for time_s in _event_times(reply.content.iter_any())]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ObservationError(f"{url}: {error or type(error).__name__}") from error
        if len(times_s) < output_tokens:
            raise ObservationError(
                f"{url}: {len(times_s)} events for {output_tokens} tokens: one event a token is "
                "needed (no multi-step scheduling, no speculative decoding)"
            )
        return times_s[:output_tokens]  # behind them stand the usage and the end mark


async def _event_times(chunks: AsyncIterator[bytes]) -> AsyncIterator[float]:
    carry = b""
    async for chunk in chunks:
        joined = carry + chunk
        now_s = _now_s()
        for _ in range(joined.count(b"data: ")):
            yield now_s
        carry = joined[-5:]  # one byte short of the mark, so none is counted twice


def _now_s() -> float:
    return asyncio.get_running_loop().time()
