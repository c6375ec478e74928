"""CPU time of sharing requests between routers: `python -m tests.bench.sharing`.

One core decides (`warmset`, 64 workers, prompts of 2,048 tokens in blocks of 16, half of each
shared) and publishes its requests; another core receives them. Figures are CPU time of one request
from its arrival to its end: to decide it, to publish it, and to receive it. `tests.bench.replicas`
measures the transport.

Predicted: to publish, three small structs and their encoding, 8 us; to receive, the ledger,
expected blocks and the session as for a request of its own, 40 us.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from kvkernels import chain_hashes
from policies.facts import Arrival, Finish, FirstToken, Tick, WorkerChange, WorkerFacts
from policies.load import load
from router.core.contract.settings import CoreSettings
from router.core.core import RequestListener, RouterCore, take
from router.replicas.sharing import Sharing
from tests.bench.measuring import Row, show

WORKERS, REQUESTS, WINDOWS, FLIGHT = 64, 400, 9, 64
BLOCK, TOKENS = 16, 2_048


class Pool:
    """The cores of two routers with the same workers. Lifetime: run."""

    def __init__(self) -> None:
        self.cores = [self._core() for _ in range(2)]
        self.sharing = [
            Sharing(f"r{n}@0", core, lambda fact, core=core: take(core, fact))  # type: ignore[misc]
            for n, core in enumerate(self.cores)
        ]
        self._now_s, self._next = 0.0, 0
        self._flying: list[int] = []
        self._random = np.random.default_rng(0)
        self._trunk = self._random.integers(0, 1 << 15, TOKENS // 2, dtype=np.int32)

    def _core(self) -> RouterCore:
        core = RouterCore(load("warmset"), CoreSettings(max_workers=WORKERS), 0)
        for number in range(WORKERS):
            facts = WorkerFacts(f"http://w{number}", ("m",), BLOCK, kv_capacity_tokens=400_000.0)
            core.on_worker(WorkerChange(0.0, number, "ready", facts))
        return core

    def arrivals(self) -> list[Arrival]:
        """Return the next arrivals, with their chains of block hashes computed."""
        made = []
        for _ in range(REQUESTS):
            own = self._random.integers(0, 1 << 15, TOKENS // 2, dtype=np.int32)
            chain = chain_hashes(np.concatenate((self._trunk, own)), BLOCK)
            self._now_s += 0.001
            self._next += 1
            session = f"s{self._next % 1_000}"
            made.append(
                Arrival(self._now_s, self._next, "m", TOKENS, {BLOCK: chain}, session=session)
            )
        return made

    def decide(self, arrivals: list[Arrival]) -> float:
        """Return the CPU seconds for each request from its arrival to its end."""
        core, began_s = self.cores[0], time.process_time()
        for arrival in arrivals:
            core.on_arrival(arrival)
            self._flying.append(arrival.request_id)
            if len(self._flying) > FLIGHT:
                ended = self._flying.pop(0)
                core.on_first_token(FirstToken(arrival.now_s, ended))
                core.on_finish(Finish(arrival.now_s, ended, TOKENS, 1_024, 100))
        used_s = time.process_time() - began_s
        core.on_tick(Tick(self._now_s))
        return used_s / len(arrivals)

    def said(self) -> tuple[list[bytes], float]:
        """Return the messages for the peer router, and the CPU seconds of encoding them for each
        request.
        """
        began_s, payloads = time.process_time(), []
        while (payload := self.sharing[0].outgoing(self._now_s)) is not None:
            payloads.append(payload)
        return payloads, (time.process_time() - began_s) / REQUESTS

    def heard(self, payloads: list[bytes]) -> float:
        """Return the CPU seconds for each request that the other core takes to receive the
        messages.
        """
        began_s = time.process_time()
        for payload in payloads:
            self.sharing[1].incoming("r0@0", payload, self._now_s)
        used_s = (time.process_time() - began_s) / REQUESTS
        self.cores[1].on_tick(Tick(self._now_s))
        return used_s


def main() -> None:
    """Measure the costs and print the table."""
    pool = Pool()
    publisher, alone, told, encoded, heard = pool.sharing[0].publisher, [], [], [], []
    pool.sharing[0].joined(0.0)
    for _ in range(WINDOWS + 2):
        pool.cores[0].listener = RequestListener()
        alone.append(pool.decide(pool.arrivals()))
        for request_id in list(pool._flying):  # requests that were not published
            pool.cores[0].on_finish(Finish(pool._now_s, request_id))
        pool._flying.clear()
        pool.cores[0].listener = publisher
        told.append(pool.decide(pool.arrivals()))
        payloads, encoding_s = pool.said()
        encoded.append(encoding_s)
        heard.append(pool.heard(payloads))
    decide, say, encode, hear = (statistics.median(n[2:]) for n in (alone, told, encoded, heard))
    show(
        [
            Row("decide a request, from arrival to end", decide * 1e6, "us"),
            Row("say it", (say - decide + encode) * 1e6, "us"),
            Row("hear one of a peer's", hear * 1e6, "us"),
            Row(
                "both, as a share of a decision", (say - decide + encode + hear) / decide * 100, "%"
            ),
        ],
        False,
    )


if __name__ == "__main__":
    main()
