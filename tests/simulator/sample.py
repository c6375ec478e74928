"""Makes the small sample of conversations that ships with the project."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import log
from pathlib import Path
from random import Random

import msgspec

BLOCK_TOKENS = 512
MAX_PROMPT_TOKENS = 120_000


@dataclass(slots=True)
class _Session:
    """One conversation while it is being generated. Lifetime: generator."""

    name: str
    remaining_turns: int
    prompt_tokens: int
    full_ids: list[int]  # ids of the prompt's full blocks so far


def conversation_sample(
    seconds: float = 300.0, sessions_per_s: float = 1.05, seed: int = 1
) -> Iterator[dict[str, object]]:
    """Yield rows of the trace schema in order of arrival, with timestamps in ms below `seconds`.
    About `3 * sessions_per_s` requests arrive per second. The same arguments give the same rows.
    """
    random = Random(seed)
    due: list[tuple[float, int, _Session]] = []
    serial, next_id = 0, 1
    # Sessions that began before the sample did, so that its first minute has later turns too.
    start_s = -120.0
    while start_s < seconds:
        start_s += random.expovariate(sessions_per_s)
        first_tokens = BLOCK_TOKENS + int(random.lognormvariate(log(5_500), 0.9))
        turns = 1 + int(random.expovariate(1 / 2.5))
        session = _Session(f"s{serial}", turns, first_tokens, [0])
        heappush(due, (start_s, serial, session))
        serial += 1
    while due and due[0][0] < seconds:
        now_s, order, session = heappop(due)
        session.prompt_tokens = min(session.prompt_tokens, MAX_PROMPT_TOKENS)
        while (len(session.full_ids) + 1) * BLOCK_TOKENS <= session.prompt_tokens:
            session.full_ids.append(next_id)
            next_id += 1
        ids = list(session.full_ids)
        if session.prompt_tokens % BLOCK_TOKENS:
            ids.append(next_id)  # a partial block grows before the next turn: a new name each time
            next_id += 1
        output_tokens = min(2_000, 1 + int(random.lognormvariate(log(300), 0.7)))
        if now_s >= 0:
            yield {
                "timestamp": int(now_s * 1000),
                "input_length": session.prompt_tokens,
                "output_length": output_tokens,
                "hash_ids": ids,
                "session_id": session.name,
            }
        session.remaining_turns -= 1
        if session.remaining_turns > 0 and session.prompt_tokens < MAX_PROMPT_TOKENS:
            session.prompt_tokens += output_tokens + int(random.lognormvariate(log(500), 1.0))
            pause_s = 8.0 + random.expovariate(1 / 35.0)
            heappush(due, (now_s + pause_s, order, session))


def write_sample(path: Path, rows: Iterator[dict[str, object]]) -> int:
    """Write rows as gzip JSON lines, the same bytes each time; return the number of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    # No name and no time in the gzip head: the same rows make the same file.
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as stream:
        for row in rows:
            stream.write(msgspec.json.encode(row) + b"\n")
            count += 1
    return count
