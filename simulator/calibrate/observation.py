"""What was measured: the time of one step, or of a few that a client can only see together."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAX_STEPS = 5_000_000
MAX_TOKENS = 1 << 40  # of any column: far beyond any step, small enough for exact sums
COLUMNS = (
    "prefill_tokens", "prefill_seqs", "decode_seqs", "decode_ctx_tokens", "attention_pairs",
    "seconds",
)  # fmt: skip


class ObservationError(ValueError):
    """Measurements that cannot be used: says the file, the line, the field and what is expected."""


class Load(NamedTuple):
    """What one step computes; an `engine.step_time.StepLoad`."""

    prefill_tokens: int = 0
    prefill_seqs: int = 0
    decode_seqs: int = 0
    decode_ctx_tokens: int = 0
    attention_pairs: float = 0.0

    @property
    def kind(self) -> str:
        """prefill, decode or mixed: what its error is shown under."""
        if not self.decode_seqs:
            return "prefill"
        return "mixed" if self.prefill_tokens else "decode"


class Observation(NamedTuple):
    """`seconds` for all of `loads`, and for `round_trips` between a client and the engine."""

    loads: tuple[Load, ...]
    seconds: float
    round_trips: int = 0

    @property
    def kind(self) -> str:
        """The kind of its first step."""
        return self.loads[0].kind


def prefill_loads(prompt_tokens: int, chunk_tokens: int) -> tuple[Load, ...]:
    """The steps of one prompt that is prefilled alone, in chunks of at most `chunk_tokens`."""
    loads = []
    for start in range(0, prompt_tokens, chunk_tokens):
        tokens = min(chunk_tokens, prompt_tokens - start)
        loads.append(Load(tokens, 1, attention_pairs=tokens * (start + tokens / 2)))
    return tuple(loads)


def read_step_log(path: Path) -> list[Observation]:
    """The steps in a CSV file with the columns `COLUMNS`, in any order, others ignored.

    Raises `ObservationError` for a file that cannot be read and for the first wrong line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(_rows(file, path))
    except OSError as error:
        raise ObservationError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise ObservationError(f"{path}: not a CSV file: {error}") from error


def _rows(file: Iterator[str], path: Path) -> Iterator[Observation]:
    reader = csv.DictReader(file)
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise ObservationError(
            f"{path}, line 1: no column {', '.join(missing)}; a step log has {','.join(COLUMNS)}"
        )
    for row in reader:
        where = f"{path}, line {reader.line_num}"
        if reader.line_num > MAX_STEPS:
            raise ObservationError(f"{where}: more than {MAX_STEPS} steps")
        counts = [int(_number(row, name, where, whole=True)) for name in COLUMNS[:4]]
        pairs = _number(row, "attention_pairs", where)
        load = Load(counts[0], counts[1], counts[2], counts[3], pairs)
        seconds = _number(row, "seconds", where)
        if not load.prefill_tokens + load.decode_seqs:
            raise ObservationError(f"{where}: a step of no tokens")
        if seconds <= 0:
            raise ObservationError(f"{where}: seconds: {seconds:g} is not above 0")
        yield Observation((load,), seconds)


def _number(row: dict[str, str], name: str, where: str, whole: bool = False) -> float:
    text = row[name]
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value <= MAX_TOKENS or (whole and value != int(value)):
        kind = "whole number" if whole else "number"
        raise ObservationError(f"{where}: {name}: {text!r} is not a {kind} in 0..{MAX_TOKENS}")
    return value
