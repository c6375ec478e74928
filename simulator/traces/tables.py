"""CSV logs of lengths and times, without prefixes: Azure's (2023 and 2024) and BurstGPT's.

Azure's logs (Patel et al., ISCA 2024) have `TIMESTAMP,ContextTokens,GeneratedTokens`, with calendar
times of up to nine decimals. BurstGPT's (Wang et al., 2024) have `Timestamp` in seconds, `Request
tokens`, `Response tokens` and more; `Session ID` is read if a file has it. Answers of no tokens,
which BurstGPT has for failed requests, count as one token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime

from simulator.traces.job import NO_IDS, Job, LineError
from simulator.traces.mooncake import MAX_ARRIVAL_S, MAX_OUTPUT_TOKENS, MAX_PROMPT_TOKENS

BLOCK_TOKENS = 16  # nothing is shared, so any size that engines use will do
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
SESSION = "Session ID"
EPOCH = datetime(1970, 1, 1)
TO_SECONDS = len("2023-11-16 18:15:46")

Cells = list[str]


def is_azure(raw: bytes) -> bool:
    """Return True if a line is Azure's heading."""
    return set(AZURE) <= set(_cells(raw))


def is_burstgpt(raw: bytes) -> bool:
    """Return True if a line is BurstGPT's heading."""
    return set(BURSTGPT) <= set(_cells(raw))


def azure_parser(_block_tokens: int) -> Callable[[bytes], Job | None]:
    """Return the function that reads one line of an Azure log; it raises `LineError`."""
    return _parser(AZURE, _calendar_ns)


def burstgpt_parser(_block_tokens: int) -> Callable[[bytes], Job | None]:
    """Return the function that reads one line of a BurstGPT log; it raises `LineError`."""
    return _parser(BURSTGPT, _seconds_ns)


def _parser(
    names: tuple[str, str, str], time_ns: Callable[[str], int]
) -> Callable[[bytes], Job | None]:
    columns: list[int] = []
    session_column: list[int] = []
    time, prompt, output = names

    def parse(raw: bytes) -> Job | None:
        cells = _cells(raw)
        if not columns:
            if not set(names) <= set(cells):
                raise LineError(f"expected a heading with the columns {', '.join(names)}")
            columns.extend(cells.index(name) for name in names)
            session_column.extend(i for i, cell in enumerate(cells) if cell == SESSION)
            return None
        if len(cells) <= max(columns):
            raise LineError(f"{len(cells)} columns; expected {max(columns) + 1} or more")
        try:
            at_ns = time_ns(cells[columns[0]])
        except (ValueError, TypeError, OverflowError) as error:
            raise LineError(f"{time}: {cells[columns[0]][:60]!r}: {error}") from error
        session = "".join(cells[column] for column in session_column if column < len(cells))
        return Job(
            at_ns,
            _tokens(cells[columns[1]], prompt, 1, MAX_PROMPT_TOKENS),
            _tokens(cells[columns[2]], output, 0, MAX_OUTPUT_TOKENS) or 1,
            NO_IDS,
            session=session or None,
        )

    return parse


def _cells(raw: bytes) -> Cells:
    text = raw.decode("utf-8-sig", "replace")
    return [cell.strip().strip('"') for cell in text.split(",")]


def _tokens(text: str, name: str, low: int, high: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not low <= value <= high:
        raise LineError(f"{name}: {text[:60]!r} is not a whole number in {low}..{high}")
    return value


def _calendar_ns(text: str) -> int:
    """Return the nanoseconds since 1970 of `2023-11-16 18:15:46.6805900`, with or without
    `+00:00`.
    """
    since = datetime.fromisoformat(text[:TO_SECONDS]) - EPOCH
    rest = text[TO_SECONDS:].removesuffix("+00:00").removesuffix("Z")
    fraction = rest.removeprefix(".")
    decimals = rest != fraction and fraction.isdecimal() and len(fraction) <= 9
    if len(text) < TO_SECONDS or (rest and not decimals):
        raise ValueError("expected YYYY-MM-DD hh:mm:ss.fffffff in UTC")
    return (since.days * 86_400 + since.seconds) * 10**9 + int(fraction.ljust(9, "0"))


def _seconds_ns(text: str) -> int:
    seconds = float(text)
    if not (0 <= seconds <= MAX_ARRIVAL_S and math.isfinite(seconds)):
        raise ValueError(f"expected seconds in 0..{MAX_ARRIVAL_S}")
    return round(seconds * 1e9)
