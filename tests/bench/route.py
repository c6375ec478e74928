"""The cost of the whole decision, from a request to its worker: 64 workers, `hybrid`.

    python -m tests.bench.route [--json] [--runs N] [--core C] [--dynamo PYTHON]

From token ids: 32,768 of them in a buffer are hashed, the index is searched, the policy computes
costs, and the choice is charged. From text: the bytes of a completion's body with 2 KB of prompt
are read, cut into text blocks and placed. Between decisions, the core receives the events that
follow one (first token, end), which is not timed. One worker in eight holds half of each prompt.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from kvkernels import chain_hashes
from policies.facts import Arrival, Finish, FirstToken, WorkerChange, WorkerFacts
from policies.load import load
from router.body.paths import PATHS
from router.body.scan import ScanLimits
from router.core.contract.actions import Dispatch
from router.core.contract.settings import CoreSettings
from router.core.core import RouterCore
from router.request.prompts import PromptReader
from router.tokens.check import TokenCheck
from tests.bench.measuring import Row, arguments, beside, peer_figures, pinned, show

WORKERS = 64
BLOCK = 16
TOKENS = 32_768
PROMPTS = 8
TEXT_BYTES = 2_048
TEXTS = 256  # bodies that are asked for in turn
DECISIONS = 400  # of one run
LIMITS = ScanLimits()
T = TypeVar("T")
Decide = Callable[[int, float], None]


def core_of(has_events: bool) -> RouterCore:
    """Return a core with 64 workers and the router's defaults."""
    core = RouterCore(load("hybrid"), CoreSettings())
    for worker_id in range(WORKERS):
        facts = WorkerFacts(
            f"w{worker_id}", ("m",), BLOCK, kv_capacity_tokens=500_000.0, has_events=has_events
        )
        core.on_worker(WorkerChange(0.0, worker_id, "ready", facts))
    return core


def by_tokens() -> tuple[RouterCore, Decide]:
    """Return a core and a function that makes decisions from token ids in a buffer."""
    core = core_of(has_events=True)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, 150_000, TOKENS).astype(np.int32) for _ in range(PROMPTS)]
    for number, tokens in enumerate(prompts):
        for worker in range(number, WORKERS, PROMPTS):
            core.caches.index.store(worker, chain_hashes(tokens[: TOKENS // 2], BLOCK))

    def decide(number: int, now_s: float) -> None:
        chain = chain_hashes(prompts[number % PROMPTS], BLOCK)
        (action,) = core.on_arrival(Arrival(now_s, number, "m", TOKENS, {BLOCK: chain}))
        assert isinstance(action, Dispatch)

    return core, decide


def bodies() -> list[bytes]:
    """Return bodies of completions; four in a row share all but the end of their prompt."""
    rng = np.random.default_rng(1)
    letters = rng.integers(97, 123, (TEXTS // 4, TEXT_BYTES), dtype=np.uint8)
    letters[:, ::6] = ord(" ")
    return [
        json.dumps(
            {
                "model": "m",
                "prompt": letters[n // 4].tobytes().decode()[:-4] + f"{n:4}",
                "max_tokens": 64,
                "stream": True,
            }
        ).encode()
        for n in range(TEXTS)
    ]


def done(reading: Coroutine[object, object, T]) -> T:
    """Run a coroutine that reads a short prompt, which never waits, and return its result."""
    try:
        reading.send(None)
    except StopIteration as end:
        found: T = end.value
        return found
    raise AssertionError("reading a short prompt waited")


def by_text(executor: ThreadPoolExecutor) -> tuple[RouterCore, Decide]:
    """Return a core and a function that makes decisions from the bytes of a body, without a
    tokenizer.
    """
    core = core_of(has_events=False)
    check = TokenCheck(time.monotonic, lambda: 1.0)
    reader = PromptReader(None, executor, time.time, 1, check)
    asked = bodies()

    def decide(number: int, now_s: float) -> None:
        scanned = done(reader.scan(asked[number % TEXTS], PATHS["/v1/completions"], LIMITS))
        model = scanned.model or ""
        base, adapter = core.workers.identity(model)
        prompt = done(reader.read(scanned, base, core.workers.block_sizes(model), adapter))
        arrival = Arrival(
            now_s=now_s,
            request_id=number,
            model=model,
            prompt_tokens=prompt.tokens,
            chains=prompt.chains,
            approximate=prompt.approximate,
            longest_prompt_tokens=prompt.longest_tokens,
        )
        (action,) = core.on_arrival(arrival)
        assert isinstance(action, Dispatch)

    return core, decide


def decision_us(core: RouterCore, decide: Decide, runs: int) -> float:
    """Return the median microseconds of one decision."""
    taken = []
    for number in range(runs * DECISIONS):
        now_s = 1.0 + number * 0.01
        start_s = time.perf_counter()
        decide(number, now_s)
        taken.append(time.perf_counter() - start_s)
        core.on_first_token(FirstToken(now_s + 0.002, number))
        core.on_finish(Finish(now_s + 0.004, number))
    return statistics.median(taken[DECISIONS:]) * 1e6


def measure(runs: int, peer: Mapping[str, float]) -> Iterator[Row]:
    """Yield the row for token ids and the row for text."""
    others = beside(peer, "select_us")
    what = "decision from 32k token ids in a buffer"
    yield Row(what, decision_us(*by_tokens(), runs), "us", 250.0, others)
    with ThreadPoolExecutor(1) as executor:
        what = "decision from a body with 2 KB of text"
        yield Row(what, decision_us(*by_text(executor), runs), "us", 35.0)


def main() -> None:
    """Measure the figures and print them."""
    options = arguments(__doc__ or "", runs=10).parse_args()
    core = pinned(options.core)
    peer = peer_figures(options.dynamo, core)
    show(measure(options.runs, peer), options.json)


if __name__ == "__main__":
    main()
