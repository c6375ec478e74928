"""Sends one request of a workload over HTTP and reports its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec
import numpy as np
import numpy.typing as npt

from simulator.live.outcome import LiveVerdict, Outcome
from simulator.live.scrape import ScrapeError
from simulator.traces.job import Job

# Four-digit ids keep bodies small and lie inside the vocabulary of every model in use.
DEFAULT_VOCABULARY = 10_000
FIRST_TOKEN_ID = 1_000  # below lie the special tokens of most vocabularies
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio
MASK = (1 << 64) - 1
PRIVATE_IDS_FROM = 1 << 63  # ids of tails that a trace gives no id to; never clash with its own


def prompt_tokens(
    ids: Sequence[int] | npt.NDArray[np.uint64],
    input_tokens: int,
    serial: int,
    block_tokens: int = 512,
    vocabulary: int = DEFAULT_VOCABULARY,
    seed: int = 0,
) -> npt.NDArray[np.int32]:
    """Return the prompt of a request as token ids: int32[input_tokens], each in
    FIRST_TOKEN_ID..vocabulary-1.

    The last block is cut so that the prompt has `input_tokens`. If `ids` names fewer blocks than
    the prompt has, the rest of the prompt is private to the request with this `serial`. Raises
    ValueError if the vocabulary is too small for a token.
    """
    if vocabulary <= FIRST_TOKEN_ID:
        raise ValueError(f"vocabulary {vocabulary}: must be above {FIRST_TOKEN_ID}")
    named = np.asarray(ids, dtype=np.uint64)
    first = PRIVATE_IDS_FROM + (serial << 16) + len(named)
    private = max(0, -(-input_tokens // block_tokens) - len(named))
    tail = np.arange(first, first + private, dtype=np.uint64)
    starts = np.concatenate((named, tail)) * np.uint64(block_tokens)
    offsets = np.arange(block_tokens, dtype=np.uint64) + np.uint64(seed * GOLDEN & MASK)
    lanes: npt.NDArray[np.uint64] = np.add.outer(starts, offsets).ravel()[:input_tokens]
    mixed = _mix(lanes)
    span = np.uint64(vocabulary - FIRST_TOKEN_ID)
    return (mixed % span).astype(np.int32) + np.int32(FIRST_TOKEN_ID)


def _mix(lanes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    lanes = lanes + np.uint64(GOLDEN)
    lanes = (lanes ^ (lanes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    lanes = (lanes ^ (lanes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return lanes ^ (lanes >> np.uint64(31))


DONE = b"data: [DONE]"
TAIL_BYTES = 8192  # room for the last events: usage and the end mark


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


class StreamMeter:
    """Measures when the tokens and the end of one server-sent event stream arrive.

    Events are counted, not parsed: one `data:` line is one token, which holds for engines that send
    each token as it is made. If the stream has a usage, the token count there is used instead.
    Lifetime: request.
    """

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s = 0.0
        self.gap_max_s = 0.0
        self.events = 0
        self._tail = b""
        self._carry = b""  # the start of a line that the next read will finish

    def feed(self, data: bytes, now_s: float) -> None:
        """Count the tokens in the next bytes of the body, which were read at `now_s`."""
        joined = self._carry + data
        fresh = joined.count(b"data: ")
        self._carry = joined[-5:]  # one byte short of the mark, so none is counted twice
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if not fresh:
            return
        self.events += fresh
        if self.first_s is None:
            self.first_s = now_s
        elif not data.startswith(DONE):
            self.gap_max_s = max(self.gap_max_s, now_s - self.last_s)
        self.last_s = now_s

    def finish(self) -> tuple[int, int | None, str | None]:
        """Return output tokens, cached tokens or None, and an error or None. Call this method after
        the last byte.
        """
        lines = [line for line in self._tail.split(b"\n") if line.startswith(b"data: ")]
        if not lines or not lines[-1].startswith(DONE):
            return self.events, None, "the stream ended before `data: [DONE]`"
        tokens, cached = self.events - 1, None
        # The first line of the tail may be cut at its start, but then it does not match.
        for line in lines[-3:-1]:
            try:
                event = msgspec.json.decode(line[6:], type=_Event)
            except msgspec.DecodeError as error:
                return tokens, None, f"an event is not JSON: {error}"
            if event.error:
                return tokens, None, f"error in the stream: {bytes(event.error)[:200]!r}"
            if event.usage is not None:
                tokens = event.usage.completion_tokens
                details = event.usage.prompt_tokens_details
                cached = (details.cached_tokens or 0) if details else None
        return tokens, cached, None if tokens > 0 else "the answer had no token"


REJECTED_STATUS = frozenset({429, 503, 529})
ERROR_BYTES = 300  # of an answer that is not 200, for the report


@dataclass(frozen=True, slots=True)
class Target:
    """The endpoint under load, and the settings of the requests that it gets. Lifetime:
    measurement.
    """

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
        """Return the base address that the request with this number is sent to."""
        return (self.url, *self.others)[serial % (1 + len(self.others))]

    def body(self, job: Job, serial: int) -> bytes:
        """Return the JSON body of `job`: a streamed completion of a prompt of token ids."""
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
        """Return the HTTP headers of the request of `job`."""
        headers = {"content-type": "application/json"}
        if job.session is not None:
            headers["x-session-id"] = job.session
        if self.api_key is not None:
            headers["authorization"] = f"Bearer {self.api_key}"
        return headers

    def open_session(self) -> aiohttp.ClientSession:
        """Return an HTTP client session with this target's limits; the caller closes it."""
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
    """Sends requests through one HTTP session, timed by one clock. Lifetime: measurement."""

    target: Target
    session: aiohttp.ClientSession
    clock: Callable[[], float]  # seconds
    started_s: float  # on `clock`: zero of the outcomes' times

    async def send(self, job: Job, serial: int, body: bytes, due_s: float) -> Outcome:
        """Send `body`, read the whole answer, and return the outcome. `due_s` is the planned time
        on the sender's clock. An error of the endpoint is not raised: it becomes the outcome's
        verdict and error.
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


def _verdict(status: int, error: str | None) -> LiveVerdict:
    if status in REJECTED_STATUS:
        return LiveVerdict.REJECTED
    return LiveVerdict.COMPLETED if status == 200 and error is None else LiveVerdict.FAILED


def _mean_gap_ms(meter: StreamMeter, tokens: int) -> float | None:
    if meter.first_s is None or tokens < 2:
        return None
    return (meter.last_s - meter.first_s) * 1000 / (tokens - 1)


async def first_model(url: str) -> str:
    """Return the first model that an endpoint lists. Raises `ScrapeError`."""
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
