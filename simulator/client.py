"""Sends one request of a workload over HTTP and reports what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import msgspec

from simulator.outcome import Outcome, Verdict
from simulator.prompt import DEFAULT_VOCABULARY, prompt_tokens
from simulator.scrape import ScrapeError
from simulator.stream import StreamMeter
from simulator.traces.job import Job

REJECTED_STATUS = frozenset({429, 503})
ERROR_BYTES = 300  # of an answer that is not 200, for the report


@dataclass(frozen=True, slots=True)
class Target:
    """The endpoint under load and how to ask it. Lifetime: measurement."""

    url: str  # base address, as http://127.0.0.1:8080
    model: str
    block_tokens: int
    vocabulary: int = DEFAULT_VOCABULARY
    seed: int = 0
    timeout_s: float = 600.0  # for the whole answer
    connect_timeout_s: float = 10.0
    max_in_flight: int = 4096  # requests at once, also the bound on connections
    api_key: str | None = None
    others: tuple[str, ...] = ()  # further base addresses of the same: requests go to all in turn

    def url_of(self, serial: int) -> str:
        """Where a request goes, by its number."""
        return (self.url, *self.others)[serial % (1 + len(self.others))]

    def body(self, job: Job, serial: int) -> bytes:
        """The JSON body of `job`: a streamed completion of a token-id prompt."""
        tokens = prompt_tokens(
            job.ids, job.prompt_tokens, serial, self.block_tokens, self.vocabulary, self.seed
        )
        return msgspec.json.encode(
            {
                "model": self.model,
                "prompt": tokens.tolist(),
                "max_tokens": job.output_tokens,
                "ignore_eos": True,  # the answer's length belongs to the workload
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    def headers(self, job: Job) -> dict[str, str]:
        """Headers of `job`."""
        headers = {"content-type": "application/json"}
        if job.session is not None:
            headers["x-session-id"] = job.session
        if self.api_key is not None:
            headers["authorization"] = f"Bearer {self.api_key}"
        return headers

    def open_session(self) -> aiohttp.ClientSession:
        """A client session with this target's limits; the caller closes it."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self.max_in_flight, keepalive_timeout=10),
            timeout=aiohttp.ClientTimeout(
                total=self.timeout_s, sock_connect=self.connect_timeout_s
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )


@dataclass(frozen=True, slots=True)
class Sender:
    """Sends requests on one session and clock. Lifetime: measurement."""

    target: Target
    session: aiohttp.ClientSession
    clock: Callable[[], float]  # seconds
    started_s: float  # on `clock`: zero of the outcomes' times

    async def send(self, job: Job, serial: int, body: bytes, due_s: float) -> Outcome:
        """Sends `body`, reads the whole answer; `due_s` is on the sender's clock.

        Never raises for what the other side does: that becomes the outcome's verdict and error.
        """
        sent_s = self.clock()
        meter = StreamMeter()
        status, worker, error = 0, None, None
        try:
            async with self.session.post(
                f"{self.target.url_of(serial)}/v1/completions",
                data=body,
                headers=self.target.headers(job),
            ) as reply:
                status = reply.status
                worker = reply.headers.get("x-warmroute-worker")
                if status == 200:
                    async for data in reply.content.iter_any():
                        meter.feed(data, self.clock())
                else:
                    text = await reply.content.read(ERROR_BYTES)
                    error = f"HTTP {status}: {text.decode(errors='replace')}"
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError, OSError) as cause:
            error = f"{type(cause).__name__}: {cause}"
        end_s = self.clock()
        tokens, cached, stream_error = meter.finish() if status == 200 else (0, None, None)
        error = error or stream_error
        return Outcome(
            serial=serial,
            scheduled_s=due_s - self.started_s,
            sent_s=sent_s - self.started_s,
            verdict=_verdict(status, error),
            status=status,
            worker=worker,
            e2e_ms=(end_s - due_s) * 1000,
            prompt_tokens=job.prompt_tokens,
            output_tokens=tokens,
            ttft_ms=None if meter.first_s is None else (meter.first_s - due_s) * 1000,
            itl_ms=_mean_gap_ms(meter, tokens),
            itl_max_ms=meter.gap_max_s * 1000 if tokens > 1 else None,
            cached_tokens=cached,
            error=error,
        )


def _verdict(status: int, error: str | None) -> Verdict:
    if status in REJECTED_STATUS:
        return Verdict.REJECTED
    return Verdict.COMPLETED if status == 200 and error is None else Verdict.FAILED


def _mean_gap_ms(meter: StreamMeter, tokens: int) -> float | None:
    if meter.first_s is None or tokens < 2:
        return None
    return (meter.last_s - meter.first_s) * 1000 / (tokens - 1)


async def first_model(url: str) -> str:
    """The first model that an endpoint lists; raises `ScrapeError`."""
    timeout = aiohttp.ClientTimeout(total=10)
    where = f"{url}/v1/models"
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(where) as reply,
        ):
            body = await reply.json()
            return str(body["data"][0]["id"])
    except (aiohttp.ClientConnectionError, TimeoutError, OSError) as error:
        why = error or type(error).__name__
        raise ScrapeError(f"nothing answers at {url} ({why}); is it running there?") from error
    except (aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
        raise ScrapeError(f"{where} lists no model ({error}); name one: --model") from error
