"""Measures the CPU time of the turns of a long agent session: the first one, whose text is new, and
later ones.
"""

from __future__ import annotations

import http.client
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tests.bench.dataplane import cpu
from tests.bench.dataplane.ledger import total
from tests.bench.dataplane.programs import Cores, engines, get
from tests.bench.dataplane.routers import Running, ours
from tests.bench.sizing.requests import WORKERS, Model
from tests.bench.sizing.table import Section, two_digits

CONTEXTS = (10_000, 30_000, 100_000)  # tokens of the first turn
BYTES = 4  # of text in a token
ADDED_TOKENS = 1_500  # by each later turn
LATER = 6
MESSAGE_TOKENS = 1_000


@dataclass(frozen=True, slots=True)
class Turn:
    """The cost of one turn of a session."""

    cpu_s: float  # of all threads of the router
    loop_s: float  # of its event loop's
    added_s: float  # by the router, beside the same body sent to an engine


class Session:
    """A chat that grows and shares no text with others. Lifetime: one measurement of a session."""

    def __init__(self, words: str, serial: int, tokens: int) -> None:
        self._words = words
        self._at = (serial * 7_919_993) % len(words)
        self._messages = [{"role": "system", "content": f"Session {serial}."}]
        self._grow(tokens)

    def _grow(self, tokens: int) -> None:
        for left in range(tokens, 0, -MESSAGE_TOKENS):
            role = "assistant" if self._messages[-1]["role"] == "user" else "user"
            text = self._next(min(left, MESSAGE_TOKENS) * BYTES)
            self._messages.append({"role": role, "content": text})

    def _next(self, size: int) -> str:
        begin = self._at % (len(self._words) - size)
        self._at += size + 61
        return self._words[begin : begin + size]

    def bodies(self) -> Iterator[bytes]:
        """Yield the request body of the first turn, then those of the later turns."""
        for _ in range(LATER + 1):
            asked = {"model": "bench", "messages": self._messages, "max_tokens": 1}
            yield json.dumps(asked).encode()
            self._grow(ADDED_TOKENS)


@dataclass(frozen=True, slots=True)
class Turns:
    """The median costs of a session's turns; `memo_bytes` is the memory that the router uses for
    the session's token ids.
    """

    first: Turn
    later: Turn
    memo_bytes: float


def sessions(tokens: int, model: Model, cores: Cores, count: int) -> Turns:
    """Measure `count` sessions one after the other."""
    words = model.words.read_text()
    first, later = [], []
    with (
        engines(cores.others, ports=WORKERS, usage=0) as behind,
        ours("--tokenizer", str(model.folder))(behind, cores) as router,
    ):
        for serial in range(count):
            turns = [
                _turn(body, router, behind.ports[0])
                for body in Session(words, serial, tokens).bodies()
            ]
            first.append(turns[0])
            later += turns[1:]
        kept = total(get(f"{router.admin}/metrics"), "warmroute_token_memo_bytes")
    return Turns(_median(first), _median(later), kept / count)


def _turn(body: bytes, router: Running, engine_port: int) -> Turn:
    assert router.pid is not None
    direct_s = _asked(body, engine_port)
    before_s, loop_before_s = cpu.cpu_s(router.pid), cpu.loop_s(router.pid)
    through_s = _asked(body, router.port)
    loop_s = cpu.loop_s(router.pid) - loop_before_s
    return Turn(cpu.cpu_s(router.pid) - before_s, loop_s, through_s - direct_s)


def _asked(body: bytes, port: int) -> float:
    """Send a body and return the seconds until the whole answer. Raises RuntimeError if its status
    is not 200.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json"}
    began_s = time.monotonic()
    connection.request("POST", "/v1/chat/completions", body, headers)
    answer = connection.getresponse()
    text = answer.read()
    took_s = time.monotonic() - began_s
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"port {port} answered {answer.status}: {text[:200]!r}")
    return took_s


def _median(turns: list[Turn]) -> Turn:
    return Turn(
        statistics.median(turn.cpu_s for turn in turns),
        statistics.median(turn.loop_s for turn in turns),
        statistics.median(turn.added_s for turn in turns),
    )


def measure(model: Model, cores: Cores, count: int) -> dict[int, Turns]:
    """Return the turns' costs by the number of tokens of the first turn."""
    return {tokens: sessions(tokens, model, cores, count) for tokens in CONTEXTS}


def section(found: dict[int, Turns]) -> Section:
    """Return the table with a row for each context size."""
    return Section(
        "turns",
        "Turns of an agent",
        f"The router tokenizes chats in messages of {MESSAGE_TOKENS:,} tokens. The text of the "
        f"first turn is new to the router; each later turn adds {ADDED_TOKENS:,} tokens. *Added* "
        "is the time until the answer less the time without a router.",
        [
            "tokens",
            "first turn: CPU, ms",
            "added, ms",
            "later turn: CPU, ms",
            "added, ms",
            "kept, MiB a chat",
        ],
        [[f"{tokens:,}", *_cells(turns)] for tokens, turns in found.items()],
    )


def _cells(turns: Turns) -> Iterator[str]:
    for turn in (turns.first, turns.later):
        yield two_digits(turn.cpu_s * 1e3)
        yield two_digits(turn.added_s * 1e3)
    yield two_digits(turns.memo_bytes / (1 << 20))
