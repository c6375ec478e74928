"""Measures NVIDIA Dynamo's KV router on the same operations that the benches measure of ours.

    PYTHON_WITH_THE_WHEEL tests/bench/peer_dynamo.py [--core C] [--runs N]

The benches run it when `--dynamo PYTHON` names an interpreter that has `ai-dynamo-runtime` (1.6.1),
numpy, msgspec and pyzmq; it needs nothing of this project. It prints one JSON object of medians.
The index is `RadixTree`; decisions and events over ZMQ are those of `SelectionService`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version

import msgspec
import numpy as np
import zmq
from dynamo._core import RadixTree, SelectionService, compute_block_hash_for_seq

TOKENS, BLOCK, WORKERS = 32_768, 16, 64
EVENT_BLOCKS = 64
EVENTS = 2_048


def median_us(work: Callable[[], object], runs: int) -> float:
    """Return the median microseconds of one call."""
    taken = []
    for _ in range(runs):
        start_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start_s)
    return statistics.median(taken) * 1e6


def stored(serial: int, parent: int | None, blocks: Iterator[tuple[int, int]]) -> bytes:
    """Return an event in the JSON that `RadixTree.apply_event` reads."""
    named = [{"block_hash": name, "tokens_hash": local} for name, local in blocks]
    data = {"stored": {"parent_hash": parent, "start_position": None, "blocks": named}}
    return json.dumps({"event_id": serial, "data": data, "dp_rank": 0}).encode()


def lookups(runs: int) -> dict[str, float]:
    """Return the times of hashing a prompt, and of looking it up when the tree has it on one edge,
    split at every block, or not at all.
    """
    tokens = np.random.default_rng(7).integers(0, 150_000, TOKENS).tolist()
    chain = compute_block_hash_for_seq(tokens, BLOCK)
    names = range(1_000, 1_000 + len(chain))
    serial = itertools.count()
    tree = RadixTree()
    for worker in range(WORKERS):
        tree.apply_event(worker, stored(next(serial), None, zip(names, chain, strict=True)))
    other = [local ^ 0x55AA for local in chain]
    found = {
        "hash_us": median_us(lambda: compute_block_hash_for_seq(tokens, BLOCK), runs),
        "prefix_us": median_us(lambda: tree.find_matches(chain), runs),
        "miss_us": median_us(lambda: tree.find_matches(other), runs),
    }
    for depth in range(len(chain) - 1):
        sibling = iter([(10_000_000 + depth, chain[depth] ^ 0x33CC)])
        tree.apply_event(depth % WORKERS, stored(next(serial), names[depth], sibling))
    found["split_us"] = median_us(lambda: tree.find_matches(chain), runs)
    return found


def events(blocks_each: int, count: int) -> float:
    """Return how many million blocks one tree stores for each second of CPU time; events are made
    beforehand.
    """
    rng = np.random.default_rng(11)
    made = []
    for serial in range(count):
        names = rng.integers(0, 2**63, blocks_each).tolist()
        locals_ = rng.integers(0, 2**63, blocks_each).tolist()
        made.append(stored(serial, None, zip(names, locals_, strict=True)))
    tree = RadixTree()
    start_s = time.process_time()
    for serial, event in enumerate(made):
        tree.apply_event(serial % 8, event)
    tree.find_matches([1])  # waits until the tree's own thread has finished
    return blocks_each * count / (time.process_time() - start_s) / 1e6


class Publishers:
    """The PUB sockets of a service's workers, one for each, as vLLM's engines have them."""

    def __init__(self, count: int) -> None:
        self._context = zmq.Context()
        self.sockets = [self._context.socket(zmq.PUB) for _ in range(count)]
        self._seq = [0] * count
        self.endpoints = []
        for socket in self.sockets:
            socket.setsockopt(zmq.SNDHWM, 0)
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            self.endpoints.append(f"tcp://127.0.0.1:{port}")

    def send(self, worker: int, payload: bytes) -> None:
        """Publish the worker's next batch."""
        seq, self._seq[worker] = self._seq[worker], self._seq[worker] + 1
        self.sockets[worker].send_multipart([b"", seq.to_bytes(8, "big"), payload])


def payload_of(tokens: list[int], names: list[int], parent: int | None) -> bytes:
    """Return one vLLM batch in array form with one stored event."""
    event = ["BlockStored", names, parent, tokens, BLOCK, None, "GPU", None]
    return msgspec.msgpack.encode([1.5, [event], 0])


async def service(runs: int) -> dict[str, float]:
    """Return the time of decisions about 32k token ids on 64 workers, and the rate of events from
    ZMQ to the index.
    """
    selection = SelectionService(indexer_threads=1)
    publishers = Publishers(WORKERS)
    for worker, endpoint in enumerate(publishers.endpoints):
        await selection.upsert_worker(
            {
                "worker_id": worker,
                "model_name": "m",
                "block_size": BLOCK,
                "endpoint": f"http://127.0.0.1:{9_000 + worker}",
                "kv_events_endpoint": endpoint,
            }
        )
    await asyncio.sleep(1.0)  # subscriptions reach their publishers
    rng = np.random.default_rng(13)
    prompt = rng.integers(0, 150_000, TOKENS).tolist()
    for worker in range(WORKERS):
        publishers.send(worker, payload_of(prompt, list(range(1, TOKENS // BLOCK + 1)), None))
    request = {"model_name": "m", "token_ids": prompt}
    await settled(selection, request)
    taken = []
    for _ in range(runs):
        start_s = time.perf_counter()
        await selection.select(request)
        taken.append(time.perf_counter() - start_s)
    rate = await ingest(selection, publishers, rng)
    selection.shutdown()
    return {"select_us": statistics.median(taken) * 1e6, "zmq_blocks_per_us": rate}


async def ingest(
    selection: SelectionService, publishers: Publishers, rng: np.random.Generator
) -> float:
    """Return how many million blocks are taken in for each second of this process's CPU time,
    sending included.
    """
    batches = []
    for serial in range(EVENTS):
        tokens = rng.integers(0, 150_000, EVENT_BLOCKS * BLOCK).tolist()
        first = 1 << 32 | serial << 12
        batches.append((tokens, payload_of(tokens, [*range(first, first + EVENT_BLOCKS)], None)))
    start_s = time.process_time()
    for serial, (_, payload) in enumerate(batches):
        publishers.send(serial % WORKERS, payload)
    for tokens, _ in batches[-WORKERS:]:
        await settled(selection, {"model_name": "m", "token_ids": tokens})
    return EVENT_BLOCKS * EVENTS / (time.process_time() - start_s) / 1e6


async def settled(selection: SelectionService, request: dict[str, object]) -> None:
    """Wait until a worker is known to hold the prompt."""
    until_s = time.monotonic() + 60.0
    while time.monotonic() < until_s:
        scores = await selection.overlap_scores(request)
        if any(worker["device_blocks"] for worker in scores["workers"]):
            return
        await asyncio.sleep(0.01)
    sys.exit("the service did not take in the events within a minute")


def main() -> None:
    """Measure Dynamo's figures and print them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--runs", type=int, default=30)
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    figures: dict[str, object] = {"version": version("ai-dynamo-runtime")}
    figures |= lookups(options.runs)
    figures["chains_blocks_per_us"] = events(EVENT_BLOCKS, EVENTS)
    figures["single_blocks_per_us"] = events(1, 20_000)
    figures |= asyncio.run(service(options.runs))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
