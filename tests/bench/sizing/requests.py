"""Measures the CPU time of a request by its kind and size, and of an event of a streamed answer."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.bench.dataplane.measured import Bench
from tests.bench.dataplane.programs import Cores, Load, engines, run_load
from tests.bench.dataplane.routers import Subject, ours
from tests.bench.dataplane.streams import streams
from tests.bench.sizing.table import Section, two_digits

WORKERS = 8
SIZES = {"500": 2_000, "4,000": 16_000, "16,000": 64_000, "100,000": 400_000}  # tokens: bytes
PROMPTS = 32
ID_BYTES = 6  # of a token id in a body, comma included


@dataclass(frozen=True, slots=True)
class Cost:
    """The CPU seconds of one request or event: of all threads, and of the event loop's thread."""

    all_s: float
    loop_s: float


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request; `tokenized` means that the router has the model's tokenizer."""

    name: str
    tokenized: bool
    chat: bool = True
    ids: bool = False
    unique: bool = True


KINDS = (
    Kind("chat, no tokenizer: matched as text", tokenized=False),
    Kind("chat, tokenized, every prompt new", tokenized=True),
    Kind("chat, tokenized, sent before", tokenized=True, unique=False),
    Kind("token ids", tokenized=False, chat=False, ids=True),
)


@dataclass(frozen=True, slots=True)
class Model:
    """The tokenizer and the text that tokenized prompts are made from."""

    folder: Path  # has the tokenizer
    words: Path  # text that prompts are cut from


def cost(kind: Kind, tokens: str, model: Model, cores: Cores, seconds: float) -> Cost:
    """Return the cost of one request in a closed loop of eight connections. Raises RuntimeError if
    a request failed.
    """
    longest = tokens == max(SIZES, key=lambda name: SIZES[name])
    size = SIZES[tokens] // 4 * ID_BYTES if kind.ids else SIZES[tokens]
    flags = ("--tokenizer", str(model.folder)) if kind.tokenized else ()
    with (
        engines(cores.others, ports=WORKERS, usage=0) as behind,
        ours(*flags)(behind, cores) as router,
    ):
        ask = partial(
            run_load,
            router.port,
            cores.others,
            router.pid,
            behind.pid,
            conns=2 if longest else 8,  # unfinished requests would falsify the figure
            distinct=PROMPTS,
            bytes=size,
            chat=kind.chat,
            ids=kind.ids,
            unique=kind.unique,
            words=model.words,
        )
        ask(count=PROMPTS)
        load = ask(seconds=4 * seconds if longest else seconds)
    return _each(load, load.requests)


def event_cost(cores: Cores, seconds: float) -> Cost:
    """Return the cost of one event of 200 bytes, with 256 streams of 20 events a second each."""
    subject = Subject("warmroute", ours())
    load, _ = streams(Bench(cores, 1, seconds, [subject]), subject, 256)
    return _each(load, load.events)


def _each(load: Load, count: int) -> Cost:
    if load.failed or not count:
        raise RuntimeError(f"{load.failed} requests failed, {count} were answered")
    return Cost(load.cpu_s / count, load.loop_s / count)


@dataclass(frozen=True, slots=True)
class Costs:
    """The median costs: of requests by kind and tokens, and of an event."""

    requests: dict[tuple[str, str], Cost]
    event: Cost


def measure(model: Model, cores: Cores, runs: int, seconds: float) -> Costs:
    """Return the median costs over rounds with all kinds and sizes of requests."""
    found: dict[tuple[str, str], list[Cost]] = {}
    events = []
    for _ in range(runs):
        for kind in KINDS:
            for tokens in SIZES:
                one = cost(kind, tokens, model, cores, seconds)
                found.setdefault((kind.name, tokens), []).append(one)
        events.append(event_cost(cores, seconds))
    return Costs({key: _median(costs) for key, costs in found.items()}, _median(events))


def _median(costs: list[Cost]) -> Cost:
    return Cost(
        statistics.median(cost.all_s for cost in costs),
        statistics.median(cost.loop_s for cost in costs),
    )


def section(costs: Costs) -> Section:
    """Return the table of milliseconds of a core for each request, and how many requests a second
    keep one core busy.
    """
    return Section(
        "requests",
        "CPU time of a request",
        "Milliseconds of one core; in brackets how many requests a second keep one core busy. "
        "A token is four bytes of text here. An event of a streamed answer takes "
        f"{costs.event.all_s * 1e6:.0f} us on top.",
        ["prompt"] + [f"{tokens} tokens" for tokens in SIZES],
        [[kind.name, *_cells(kind, costs)] for kind in KINDS],
    )


def _cells(kind: Kind, costs: Costs) -> Iterator[str]:
    for tokens in SIZES:
        took_s = costs.requests[kind.name, tokens].all_s
        yield f"{two_digits(took_s * 1e3)} ({two_digits(1 / took_s)})"
