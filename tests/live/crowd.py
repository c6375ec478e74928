"""Many clients at once, some with open streams and some with a fixed rate of requests; each answer
is checked.

A simulated worker's tokens are a function of the prompt, so the right answer is known beforehand. A
stream that was migrated to another worker must not lack a token, repeat one, or have two in the
wrong order.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from engine.server.settings import DEFAULT_VOCAB
from engine.timed import continuation
from engine.wire.tokens import WordTokenizer
from tests.live.stack import MODEL, until

FAMILIES, MEMBERS, PREFIX_TOKENS = 6, 8, 80
WHOLE_TOKENS = 2  # tokens of an answer that is not streamed
AT_ONCE = 128  # clients that keep up the rate; the shortfall is reported
CLIENT_S = 90.0  # no client waits for longer, so that a hang shows
SHOWN = 10  # of the failures


@dataclass
class Crowd:
    """Clients that check every answer.

    `streams` clients send a new request as soon as the last one was answered. Others begin `rate`
    requests a second, with at most `AT_ONCE` in flight. Lifetime: test.
    """

    url: str
    streams: int
    rate: float
    stream_tokens: int
    fields: str = ""  # further lines of each head, each with its CRLF
    tls: ssl.SSLContext | None = None
    stays: int = 1 << 30  # requests of one connection; then the client opens another one
    reconnects: bool = False  # as HTTP clients do after an idle connection was closed; counted
    again: int = 0  # requests that were repeated for that reason
    served: Counter[str] = field(default_factory=Counter)  # "stream" and "whole"
    lost: list[str] = field(default_factory=list)  # answers that were not right, and why
    waits_s: deque[float] = field(default_factory=lambda: deque(maxlen=100_000))
    begun: int = 0  # at the rate
    began_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        tokenizer = WordTokenizer(DEFAULT_VOCAB)
        self._prompts = [
            [family * 1000 + n for n in range(PREFIX_TOKENS)] + [family, member, 7]
            for family in range(FAMILIES)
            for member in range(MEMBERS)
        ]
        self._right = {
            (number, count): tokenizer.decode(continuation(prompt, count, DEFAULT_VOCAB))
            for number, prompt in enumerate(self._prompts)
            for count in (self.stream_tokens, WHOLE_TOKENS)
        }
        self._bodies = {
            (number, stream): self._request(prompt, stream)
            for number, prompt in enumerate(self._prompts)
            for stream in (False, True)
        }
        self._rng = random.Random(self.streams)

    def _request(self, prompt: list[int], stream: bool) -> bytes:
        count = self.stream_tokens if stream else WHOLE_TOKENS
        body = {"model": MODEL, "prompt": prompt, "max_tokens": count, "stream": stream}
        sent = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += self.fields
        return f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent

    def summary(self) -> str:
        """Return a summary for people: how many requests were served and what went wrong."""
        waits = sorted(self.waits_s)
        p50, p99 = (waits[int(len(waits) * share)] if waits else 0.0 for share in (0.5, 0.99))
        return (
            f"{self.served['stream']} streams and {self.served['whole']} other answers right, "
            f"{len(self.lost)} not {self.lost[:SHOWN]}, {self.again} asked again; "
            f"{self.begun_per_s():.0f} of {self.rate:g} begun a second, "
            f"answers after {1000 * p50:.0f} ms, p99 {1000 * p99:.0f} ms"
        )

    def begun_per_s(self) -> float:
        """The number of unstreamed requests begun per second since the start."""
        return self.begun / max(time.monotonic() - self.began_s, 1e-9)

    async def stream_on(self, stop: asyncio.Event) -> None:
        """Run one client that reads one stream after another until `stop`."""
        async with self._talking() as client:
            while not stop.is_set():
                await self._ask(client, True)

    async def at_the_rate(self, stop: asyncio.Event) -> None:
        """Run one of the clients that begin requests at the fixed rate until `stop`."""
        async with self._talking() as client:
            while not stop.is_set():
                due_s = self.began_s + self.begun / self.rate
                self.begun += 1
                if (early_s := due_s - time.monotonic()) > 0:
                    await asyncio.sleep(early_s)
                await self._ask(client, False)

    @asynccontextmanager
    async def _talking(self) -> AsyncIterator[Client]:
        """Yield a client; its connection is closed at the end."""
        client = Client(self.url, self.tls, self.stays, self.reconnects)
        try:
            yield client
        finally:
            self.again += client.again
            await client.close()

    async def _ask(self, client: Client, stream: bool) -> None:
        number = self._rng.randrange(len(self._prompts))
        count = self.stream_tokens if stream else WHOLE_TOKENS
        kind = "stream" if stream else "whole"
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(CLIENT_S):
                said = await client.ask(self._bodies[number, stream], stream)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            await client.close()
            self.lost.append(f"{kind} after {time.monotonic() - began_s:.1f} s: {error!r}")
            return
        if said != self._right[number, count]:
            self.lost.append(f"{kind}: {said!r} instead of {self._right[number, count]!r}")
            return
        self.served[kind] += 1
        if not stream:
            self.waits_s.append(time.monotonic() - began_s)


class Client:
    """One client connection, which is replaced when it is lost. It uses a tenth of aiohttp's CPU
    time.
    """

    def __init__(self, url: str, tls: ssl.SSLContext | None, stays: int, reconnects: bool) -> None:
        self.again = 0
        parts = urlsplit(url)
        self._at = parts.hostname, parts.port
        self._tls = tls
        self._stays = stays
        self._reconnects = reconnects
        self._asked = 0  # on this connection
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, request: bytes, stream: bool) -> str:
        """Send a request and return the answer's text.

        Raises ValueError if the answer is malformed or incomplete, and OSError or EOFError if the
        connection ends before it.
        """
        idle = self._writer is not None
        try:
            head = await self._head(request)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            nothing = not getattr(error, "partial", b"")
            if not (self._reconnects and idle and nothing):
                raise
            # It may be closed while the request is on its way (RFC 9112, section 9.3.1).
            self.again += 1
            await self.close()
            head = await self._head(request)
        assert self._reader is not None
        fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:-2])
        if b"content-length" in fields:
            data = await self._reader.readexactly(int(fields[b"content-length"]))
        else:
            data = await _chunks(self._reader)
        if not head.startswith(b"HTTP/1.1 200 "):
            raise ValueError(f"{head[:40]!r}: {data[:300]!r}")
        if fields.get(b"connection") == b"close" or self._asked >= self._stays:
            await self.close()
        return _text(data) if stream else _complete_text(data)

    async def _head(self, request: bytes) -> bytes:
        if self._reconnects and self._reader is not None and self._reader.at_eof():
            await self.close()  # the idle connection ended before anything was sent
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._at, ssl=self._tls)
            self._asked = 0
        self._asked += 1
        self._writer.write(request)
        return await self._reader.readuntil(b"\r\n\r\n")

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readexactly(2)
    return b"".join(parts)


def _complete_text(data: bytes) -> str:
    answer = json.loads(data)
    (choice,) = answer["choices"]
    if (answer["usage"]["completion_tokens"], choice["finish_reason"]) != (WHOLE_TOKENS, "length"):
        raise ValueError(f"another answer than was asked for: {data[:300]!r}")
    text: str = choice["text"]
    return text


def _text(data: bytes) -> str:
    *events, done, rest = data.split(b"\n\n")
    if (done, rest) != (b"data: [DONE]", b""):
        raise ValueError(f"a stream without its end: {data[-300:]!r}")
    said = [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events]
    return "".join(said)


@asynccontextmanager
async def crowding(crowd: Crowd) -> AsyncIterator[Crowd]:
    """Run the crowd of clients during the block, which begins once streams are answered; afterwards
    wait for all answers.
    """
    stop = asyncio.Event()
    crowd.began_s = time.monotonic()
    async with asyncio.TaskGroup() as clients:
        for _ in range(crowd.streams):
            clients.create_task(crowd.stream_on(stop))
        for _ in range(AT_ONCE):
            clients.create_task(crowd.at_the_rate(stop))
        try:

            async def going() -> bool:
                return crowd.served["stream"] >= crowd.streams // 4

            await until(going, "the first streams to be answered")
            yield crowd
        finally:
            stop.set()
