"""CPU time of being able to migrate a stream: microseconds for each event, and before each request.

    python -m tests.bench.migration

Prediction: a few microseconds for an event, because its JSON is read and its ids are cut out; an
event that is relayed unchanged costs less than two (`framing`).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import kvkernels
from router.http.bodies import ChunkedBody
from router.migration.journal import Journal, Room
from router.migration.plan import Plan, plan_of, with_return_token_ids
from router.upstream.meter import Meter
from tests.router.migration.migration_engines import Engine
from tests.router.migration.migration_support import FORMS

EVENTS = 2_000
ROUNDS = 15
CHAT = "/v1/chat/completions"


def request(words: int) -> bytes:
    """Return the body of a streamed chat request of `words` words."""
    messages = [{"role": "user", "content": "lorem ipsum " * (words // 2)}]
    body = {"model": "m", "messages": messages, "max_tokens": EVENTS, "stream": True}
    return json.dumps(body).encode()


def cpu_us(work: Callable[[], Any], times: int) -> float:
    """Return the median CPU microseconds of one operation; a call of `work` does `times`
    of them.
    """
    rounds = []
    for _ in range(ROUNDS):
        began_s = time.process_time()
        work()
        rounds.append((time.process_time() - began_s) / times * 1e6)
    return statistics.median(rounds)


def main() -> None:
    """Measure the figures and print them."""
    body = request(10)
    plan = plan_of(body, CHAT, EVENTS)
    assert isinstance(plan, Plan)
    for kind in ("vllm", "warmroute"):
        asked = json.loads(with_return_token_ids(body, plan))
        events = Engine(kind, "a").stream(asked, [1, 2, 3], EVENTS)
        chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]

        def journal(plan: Plan = plan, kind: str = kind, events: list[bytes] = events) -> None:
            it = Journal(plan, Room(1 << 20, 1 << 20))
            it.begin(FORMS[kind])
            for event in events:
                it.feed(event)
            assert len(it.answer_ids) == EVENTS, it.unfit

        def framing(chunks: list[bytes] = chunks) -> None:
            body, meter = ChunkedBody(4_096, 4_096), Meter(True, 8_192)
            for chunk in chunks:
                meter.feed(body.feed(chunk))

        def native(kind: str = kind, events: list[bytes] = events) -> None:
            room = kvkernels.RelayRoom(1 << 20, 1 << 20)
            terms = kvkernels.RelayJournalTerms(room, FORMS[kind].hidden, b"")
            it = kvkernels.RelayJournal(terms)
            for event in events:
                it.feed(event)
            assert len(it.said) == 4 * EVENTS, it.unfit

        if kvkernels.Relay is not None:
            print(f"{kind}: native journal {cpu_us(native, len(events)):.2f} us")
        kept, followed = cpu_us(journal, len(events)), cpu_us(framing, len(events))
        print(
            f"{kind}: event of {len(events[9])} bytes: journal {kept:.1f} us, framing "
            f"{followed:.1f} us, ratio {kept / followed:.1f}"
        )
    for words in (300, 10_000):
        body = request(words)

        def plans(body: bytes = body) -> None:
            for _ in range(100):
                plan = plan_of(body, CHAT, EVENTS)
                assert isinstance(plan, Plan)
                with_return_token_ids(body, plan)

        print(f"request of {len(body)} bytes: {cpu_us(plans, 100):.1f} us")


if __name__ == "__main__":
    main()
