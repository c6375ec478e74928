"""The median TTFT of long chats that arrive at once, compared with that of the last chat.

    python -m tests.bench.reading_order [--chats 16 64] [--json]

A router has a worker that answers at once, so that nearly all of the time is the router's reading.
Chats have 69 KB, 36,401 tokens of a small tokenizer, each from its own client. If they are read in
the order of arrival, the median's time is half of the last one's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench.measuring import Row, show
from tests.engine.model_dirs import write_model
from tests.live.stack import MODEL, Stack, exchanged, misbehaving, running

BAR = 0.6
TEXT = "The quick brown fox said: hello there, and\n went on. " * 1_300
ANSWER_BODY = b'{"choices":[{"text":"a","finish_reason":"length"}]}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(ANSWER_BODY),
    ANSWER_BODY,
)


def requests(chats: int) -> list[bytes]:
    """Return the request bytes of long chats that share no text."""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
    )
    made = []
    for number in range(chats):
        message = {"role": "user", "content": f"{number} {TEXT}"}
        body = json.dumps({"model": MODEL, "messages": [message], "max_tokens": 1})
        made.append(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return made


async def waits_s(stack: Stack, chats: int) -> list[float]:
    """Return the seconds from sending each chat to its answer, in ascending order."""

    async def wait_s(request: bytes) -> float:
        began_s = time.monotonic()
        status, _ = await exchanged(stack.url, request)
        assert status == 200, status
        return time.monotonic() - began_s

    return sorted(await asyncio.gather(*map(wait_s, requests(chats))))


async def measured(chats: Sequence[int]) -> list[Row]:
    """Return three rows for each number of chats."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = str(write_model(folder / "model"))
        async with (
            misbehaving(ANSWER) as (worker, _),
            running(folder / "logs", 0, ("--tokenizer", tokenizer)) as stack,
        ):
            await stack.add(worker)
            await waits_s(stack, 2)
            for count in chats:
                found = await waits_s(stack, count)
                median_s, last_s = statistics.median(found), found[-1]
                rows += [
                    Row(f"{count} long chats, the median", median_s, "s"),
                    Row(f"{count} long chats, the last", last_s, "s"),
                    Row(f"{count} long chats, median / last", median_s / last_s, "", BAR),
                ]
    return rows


def main() -> None:
    """Measure the figures and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--chats", type=int, nargs="+", default=[16, 64], help="that come at once")
    options = parser.parse_args()
    show(asyncio.run(measured(options.chats)), options.json)


if __name__ == "__main__":
    main()
