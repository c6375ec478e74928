"""The time from a body's bytes to its chain hashes, natively and by the path for any body.

    python -m tests.bench.reading [--json] [--runs N] [--core C]

There is no tokenizer; blocks have 16 tokens. Figures are CPU time, the least of all rounds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from router.body.scan import ScanLimits, scan
from router.request.prompts import PromptReader, plain_scan
from router.tokens.check import TokenCheck
from tests.bench.measuring import Row, arguments, pinned, show
from tests.bench.route import done

LIMITS = ScanLimits()
SIZES = frozenset((16,))
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "The quick brown fox said: hello there, and\n went on. " * 1_300


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Yield (name, path, bytes) for each request body."""

    def body(**asked: object) -> bytes:
        return json.dumps({"model": "m", "max_tokens": 64, "stream": True} | asked).encode()

    def chat(size: int, turns: int) -> bytes:
        message = {"role": "user", "content": TEXT[: size // turns]}
        return body(messages=[message] * turns)

    yield "2 KB of text", COMPLETIONS, body(prompt=TEXT[:2_048])
    yield "64 KB of text", COMPLETIONS, body(prompt=TEXT[:65_536])
    yield "a chat of 2 KB", CHAT, chat(2_048, 1)
    yield "a chat of 64 KB, 40 messages", CHAT, chat(65_536, 40)
    yield "512 token ids", COMPLETIONS, body(prompt=list(range(100_000, 100_512)))
    yield "16,384 token ids", COMPLETIONS, body(prompt=list(range(100_000, 116_384)))


def least_us(work: Callable[[], object], runs: int, repeat: int) -> float:
    """Return the CPU time of one call of `work` in microseconds, the least of `runs` runs of
    `repeat` calls.
    """
    taken = []
    for _ in range(runs):
        start_s = time.thread_time()
        for _ in range(repeat):
            work()
        taken.append((time.thread_time() - start_s) / repeat * 1e6)
    return min(taken)


def measure(runs: int) -> Iterator[Row]:
    """Yield two rows for each body."""
    check = TokenCheck(time.monotonic, lambda: 1.0)
    with ThreadPoolExecutor(1) as executor:
        reader = PromptReader(None, executor, time.time, 1, check)
        for name, path, body in bodies():

            def natively(body: bytes = body, path: str = path) -> None:
                plain = plain_scan(body, path, LIMITS)
                assert plain is not None
                done(reader.read(plain, "m", SIZES))

            def any_body(body: bytes = body, path: str = path) -> None:
                done(reader.read(scan(body, path, LIMITS), "m", SIZES))

            repeat = 500 if len(body) < 10_000 else 40
            bar = 5.0 if name == "2 KB of text" else None
            yield Row(f"read {name}", least_us(natively, runs, repeat), "us", bar)
            yield Row(f"read {name}, any way", least_us(any_body, runs, repeat), "us", None)


def main() -> None:
    """Measure the figures and print them."""
    options = arguments(__doc__ or "", runs=20).parse_args()
    pinned(options.core)
    show(measure(options.runs), options.json)


if __name__ == "__main__":
    main()
