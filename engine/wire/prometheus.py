"""Samples out of a Prometheus text exposition (format 0.0.4): only the wanted ones are read.

Engines expose hundreds of lines, of which a router wants a handful many times a second.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from engine.wire.errors import WireError

MAX_TEXT_BYTES = 8 << 20
MAX_RANKS = 4_096
MAX_VALUE = 1e18  # of a series: no count of anything is larger

_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


class Sample(NamedTuple):
    """One line."""

    name: str  # a counter's without `_total`
    labels: Mapping[str, str]
    value: float  # 0..MAX_VALUE
    line: int  # from 1


def samples(text: str, wanted: Collection[str]) -> Iterator[Sample]:
    """The samples named in `wanted` (counters without `_total`), in order.

    Raises WireError that names the line, for one of these that cannot be read or is no load:
    negative, not a number, above MAX_VALUE.
    """
    if len(text) > MAX_TEXT_BYTES:
        raise WireError(f"metrics of {len(text)} characters; at most {MAX_TEXT_BYTES}")
    beginnings = tuple(wanted)
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.startswith(beginnings):
            continue
        name = line.split("{", 1)[0].split(" ", 1)[0].removesuffix("_total")
        if name in wanted:
            labels, value = _sample(line, number)
            yield Sample(name, labels, value, number)


def _sample(line: str, number: int) -> tuple[dict[str, str], float]:
    labels: dict[str, str] = {}
    rest = line.partition(" ")[2]
    if "{" in line:
        inside, brace, rest = line.partition("{")[2].rpartition("}")
        if not brace:
            raise WireError(f"metrics line {number}: labels are not closed")
        labels = {name: _unescaped(value) for name, value in _LABEL.findall(inside)}
    try:
        value = float(rest.split()[0])
    except (IndexError, ValueError) as error:
        raise WireError(f"metrics line {number}: no number after the name") from error
    if not 0 <= value <= MAX_VALUE:
        raise WireError(f"metrics line {number}: {value} is not a load")
    return labels, value


def _unescaped(value: str) -> str:
    if "\\" not in value:
        return value
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], value)


def label_count(sample: Sample, name: str) -> int | None:
    """The label `name` as a count; None where it is absent or says None. Raises WireError."""
    text = sample.labels.get(name)
    if text is None or text == "None":
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 12:
        raise WireError(f"metrics line {sample.line}: {name}={text[:40]!r} is not a count")
    return int(text)


def label_rank(sample: Sample, name: str) -> int | None:
    """The label `name` as a data-parallel rank; None where it is absent. Raises WireError."""
    rank = label_count(sample, name)
    if rank is not None and rank >= MAX_RANKS:
        raise WireError(f"metrics line {sample.line}: rank {rank}; allowed: 0..{MAX_RANKS - 1}")
    return rank
