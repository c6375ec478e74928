"""The cost of KV events from their bytes to the index, compared with plain Python and Dynamo.

    python -m tests.bench.events [--json] [--runs N] [--core C] [--dynamo PYTHON]

Blocks have 16 tokens. The row "by chain" measures what replays and recordings do: names and chain
hashes are known already. The rows of "payloads" measure vLLM's batches in map form, which are
decoded, hashed, named and stored. Over ZMQ, publisher and subscriber share the core and the
process, so both are counted; the same holds for Dynamo.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import msgspec
import numpy as np
import zmq

from kvkernels import EventBatch, PrefixIndex, WorkerBlocks
from tests.bench.measuring import Row, arguments, beside, peer_figures, pinned, show
from tests.oracles import index as twins
from tests.oracles import worker_blocks as event_twins

BLOCK = 16
CHAIN_BLOCKS = 64  # of one event
BATCHES = 2_048
SINGLES = 256  # one-block events of one batch
WORKERS = 8
Peer = Mapping[str, float]


def rate(work: Callable[[], int], runs: int) -> float:
    """Return how many million blocks `work` handles for each second of CPU time, as the median of
    `runs` runs. `work` returns its number of blocks.
    """
    rates = []
    for _ in range(runs):
        start_s = time.process_time()
        blocks = work()
        rates.append(blocks / (time.process_time() - start_s) / 1e6)
    return statistics.median(rates)


def stored_map(names: list[int], parent: int | None, tokens: list[int]) -> dict[str, object]:
    """Return a stored event in the form of vLLM 0.24 and later."""
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def chain_payloads(count: int) -> list[bytes]:
    """Return batches of KV events; each batch has one event of 64 blocks."""
    rng = np.random.default_rng(3)
    return [
        msgspec.msgpack.encode(
            [
                1.5,
                [
                    stored_map(
                        rng.integers(0, 2**64, CHAIN_BLOCKS, dtype=np.uint64).tolist(),
                        None,
                        rng.integers(0, 150_000, CHAIN_BLOCKS * BLOCK).tolist(),
                    )
                ],
                0,
            ]
        )
        for _ in range(count)
    ]


def single_payloads(count: int) -> list[bytes]:
    """Return batches of many events of one block each, from as many sequences that grow block by
    block.
    """
    rng = np.random.default_rng(4)
    return [
        msgspec.msgpack.encode(
            [
                1.5,
                [
                    stored_map([name], None, tokens)
                    for name, tokens in zip(
                        rng.integers(0, 2**64, SINGLES, dtype=np.uint64).tolist(),
                        rng.integers(0, 150_000, (SINGLES, BLOCK)).tolist(),
                        strict=True,
                    )
                ],
                0,
            ]
        )
        for _ in range(count)
    ]


def fresh() -> list[WorkerBlocks]:
    """Return the block tables of eight workers in an empty index."""
    index = PrefixIndex(WORKERS, max_entries=1 << 22)
    return [WorkerBlocks(index, worker, BLOCK, "m") for worker in range(WORKERS)]


def by_chain(runs: int, peer: Peer) -> Row:
    """Return the row for events whose names and chain hashes are known, with 64 blocks a call."""
    chains = np.random.default_rng(1).integers(0, 2**64, (8_192, CHAIN_BLOCKS), dtype=np.uint64)

    def work() -> int:
        workers = fresh()
        for serial, chain in enumerate(chains):
            workers[serial % WORKERS].store(chain, None, chain)
        return chains.size

    def twin() -> int:
        index = twins.PrefixIndex(WORKERS, max_entries=1 << 22)
        blocks = event_twins.WorkerBlocks(index, 0, BLOCK, "m")
        for chain in chains[:256]:
            blocks.store(chain, None, chain)
        return chains[:256].size

    others = {"twin": rate(twin, 3)} | beside(peer, "chains_blocks_per_us")
    return Row("stored by chain, 64 blocks a call", rate(work, runs), "M/s", 8.0, others)


def applied(payloads: list[bytes]) -> Callable[[], int]:
    """Return a function that applies the payloads to the index with the native code."""

    def work() -> int:
        workers = fresh()
        for serial, payload in enumerate(payloads):
            workers[serial % WORKERS].apply(EventBatch(payload))
        return sum(int(worker.stored_blocks) for worker in workers)

    return work


def twin_applied(payloads: list[bytes]) -> Callable[[], int]:
    """Return a function that applies the payloads to the index in plain Python."""

    def work() -> int:
        index = twins.PrefixIndex(WORKERS, max_entries=1 << 22)
        blocks = event_twins.WorkerBlocks(index, 0, BLOCK, "m")
        for payload in payloads:
            blocks.apply(event_twins.EventBatch(payload))
        return blocks.stored_blocks

    return work


def over_zmq(payloads: list[bytes]) -> Callable[[], int]:
    """Return a function that sends the payloads through a PUB and a SUB socket and applies them."""

    def work() -> int:
        workers = fresh()
        with zmq.Context() as context:
            pub, sub = context.socket(zmq.PUB), context.socket(zmq.SUB)
            pub.setsockopt(zmq.SNDHWM, 0)
            sub.setsockopt(zmq.RCVHWM, 0)
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            sub.connect(f"tcp://127.0.0.1:{pub.bind_to_random_port('tcp://127.0.0.1')}")
            while not sub.poll(10):  # until the subscription has reached the publisher
                pub.send_multipart([b"", b"hello"])
            for serial, payload in enumerate(payloads):
                pub.send_multipart([b"", serial.to_bytes(8, "big"), payload])
            taken = 0
            while taken < len(payloads):
                frames = sub.recv_multipart()
                if len(frames) == 3:
                    workers[taken % WORKERS].apply(EventBatch(frames[2]))
                    taken += 1
            pub.close(linger=0)
            sub.close(linger=0)
        return sum(int(worker.stored_blocks) for worker in workers)

    return work


def memory_row() -> Row:
    """Return the row for the bytes per block of the map from engines' names to chain hashes, the
    greatest at any fill of more than a quarter.
    """
    index = PrefixIndex(1, max_entries=1 << 20)
    blocks = WorkerBlocks(index, 0, BLOCK, "m")
    worst = 0.0
    for chain in np.random.default_rng(6).integers(0, 2**64, (256, 2_048), dtype=np.uint64):
        blocks.store(chain, None, chain)
        if len(blocks) >= 1 << 17:
            worst = max(worst, blocks.memory_bytes / len(blocks))
    return Row("memory, map of names", worst, "B/block", 32.0)


def measure(runs: int, peer: Peer) -> Iterator[Row]:
    """Yield the rows of all measurements."""
    yield by_chain(runs, peer)
    singles, chains = single_payloads(1_024), chain_payloads(BATCHES)
    others = {"twin": rate(twin_applied(singles[:32]), 3)} | beside(peer, "single_blocks_per_us")
    what = f"payloads of {SINGLES} events of one block"
    yield Row(what, rate(applied(singles), runs), "M/s", 3.0, others)
    twin = {"twin": rate(twin_applied(chains[:64]), 3)}
    yield Row("payloads of 64 blocks", rate(applied(chains), runs), "M/s", 4.0, twin)
    others = beside(peer, "zmq_blocks_per_us")
    what = "payloads of 64 blocks, through ZMQ and back"
    yield Row(what, rate(over_zmq(chains), runs), "M/s", None, others)
    yield memory_row()


def main() -> None:
    """Measure all rows and print them."""
    options = arguments(__doc__ or "", runs=7).parse_args()
    core = pinned(options.core)
    peer = peer_figures(options.dynamo, core)
    show(measure(options.runs, peer), options.json)


if __name__ == "__main__":
    main()
