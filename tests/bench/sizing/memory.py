"""Measures the router's memory by cached blocks, sessions and streams."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from kvkernels import _native
from tests.bench.dataplane import cpu
from tests.bench.dataplane.measured import Bench
from tests.bench.dataplane.programs import Cores
from tests.bench.dataplane.routers import Subject, ours
from tests.bench.dataplane.streams import streams
from tests.bench.sessions import BLOCK, OWN_BLOCKS, Pool
from tests.bench.sizing.table import Section, two_digits

CHAIN_BLOCKS = 2_048
BLOCKS = 1 << 20
SESSIONS = 50_000
STREAMS = 1_000
WORKERS = 64


@dataclass(frozen=True, slots=True)
class Memory:
    """The measured memory in bytes of a block, of a session and of a stream."""

    block: float  # in the index, of one worker
    shared_block: float  # in the index, of all 64 workers
    session: float  # of 40 blocks, half of them shared with others
    stream: float


def block_bytes(holders: int) -> float:
    """Return the bytes of a distinct block that `holders` workers hold."""
    index = _native.PrefixIndex(WORKERS, max_entries=BLOCKS)
    rng = np.random.default_rng(3)
    for number in range(BLOCKS // CHAIN_BLOCKS):
        chain = rng.integers(0, 2**64, CHAIN_BLOCKS, dtype=np.uint64)
        for offset in range(holders):
            index.store((number + offset) % WORKERS, chain)
    return index.memory_bytes / len(index)


def session_bytes() -> float:
    """Return how many bytes of resident memory following one session adds to this process."""
    Pool(WORKERS, 10)  # loads everything that a first pool loads
    before_kb = cpu.rss_kb(os.getpid())
    pool = Pool(WORKERS, SESSIONS)
    grown_kb = cpu.rss_kb(os.getpid()) - before_kb
    del pool
    return grown_kb * 1024 / SESSIONS


def stream_bytes(cores: Cores, seconds: float) -> float:
    """Return the bytes of memory that an open stream of 20 events a second takes."""
    subject = Subject("warmroute", ours())
    load, before_kb = streams(Bench(cores, 1, seconds, [subject]), subject, STREAMS)
    return (load.rss_kb - before_kb) * 1024 / STREAMS


def measure(cores: Cores, seconds: float) -> Memory:
    """Measure the memory once, since it does not depend on other load of the machine."""
    return Memory(
        block_bytes(1), block_bytes(WORKERS), session_bytes(), stream_bytes(cores, seconds)
    )


def section(found: Memory) -> Section:
    """Return the table of memory for a million blocks, a hundred thousand sessions and a thousand
    streams.
    """
    mebi = 1 << 20
    return Section(
        "memory",
        "Memory",
        "At the bounds of blocks and sessions the router forgets the coldest; a request beyond "
        "its bound gets 503.",
        ["what", "MiB", "bound"],
        [
            [
                "1,000,000 cached blocks, each at one worker",
                two_digits(found.block * 1e6 / mebi),
                "`limits.index_entries`",
            ],
            [
                "the same, each at all of 64 workers",
                two_digits(found.shared_block * 1e6 / mebi),
                "`limits.index_entries`",
            ],
            [
                f"100,000 sessions of {OWN_BLOCKS} own blocks of {BLOCK} tokens",
                two_digits(found.session * 1e5 / mebi),
                "`limits.session_blocks`",
            ],
            [
                f"{STREAMS:,} open streams",
                two_digits(found.stream * STREAMS / mebi),
                "`limits.inflight_requests`",
            ],
        ],
    )
