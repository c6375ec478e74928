"""Published results on several routers in front of one pool, which know more or less of each
other's requests.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from simulator.replay.result import NEVER
from simulator.replay.setup import World
from tests.simulator.anchors.record import Anchor, Compared, Hardware, Measured
from tests.simulator.anchors.runs import Pool, result

MOCK = Hardware("none: 120 workers of a mock, any step times", "llama-3.1-8b-h100")
# A third of the conversations has a second turn, in the source and here.
SESSIONS = "gen:sessions?system=500&context=3500*0.6&question=200&output=150&think_s=5&turns=1..2"


@cache
def stays(replicas: int, share: bool, events: bool, full: bool) -> float:
    """Return the share of second turns that go to the worker of the session's first turn."""
    source = f"{SESSIONS}&sessions={2400 if full else 240}&rate={300 if full else 75}"
    world = World(replicas=replicas, replicas_share=share, events=events)
    pool = Pool(120 if full else 30, MOCK.profile)
    _, found = result(source, "cache_aware", pool, world=world, closed_loop=True)
    table = found.table
    order = np.lexsort((table.arrival_ns, table.session))
    session, worker = table.session[order], table.worker[order]
    second = (session[1:] == session[:-1]) & (session[1:] != NEVER)
    return float(np.mean(worker[1:][second] == worker[:-1][second]))


def gateways(full: bool) -> Measured:
    """Measure how many second turns stay on their worker if the routers share everything, if they
    only receive the workers' events, or if they know nothing of each other.
    """
    alone_2, alone_8 = stays(2, False, False, full), stays(8, False, False, full)
    heard_8, shared_8 = stays(8, False, True, full), stays(8, True, True, full)
    ordered = shared_8 >= heard_8 > alone_8 and alone_2 > alone_8
    return Measured(ordered, (alone_2, alone_8, heard_8, shared_8))


HEARD = (
    "In the source a single gateway, too, sends only 0.85 of the turns to the worker of the first "
    "turn, so the number of gateways is not the whole cause. Our routers get each KV event within "
    "a millisecond and choose workers by these events."
)
ANCHORS = (
    Anchor(
        "smg-gateways-2026",
        "SMG, shared prefix-cache index, smg-project/smg#2438, 2026 (simulated)",
        MOCK, "conversations of one or two turns through 2 or 8 gateways",
        "cache-aware = `cache_aware`",
        "with 8 gateways: sharing before events alone before nothing; without, 2 before 8",
        (
            Compared("turns on their first's worker, nothing shared, 2 gateways", 0.52, short=0.3),
            Compared("the same, nothing shared, 8 gateways", 0.11),
            Compared("the same, events alone, 8 gateways", 0.74, HEARD),
            Compared("the same, all shared, 8 gateways", 0.99, short=0.25),
        ),
        gateways,
        reach="As in the source, 300 conversations a second begin on 120 workers. The source does "
        "not give the lengths of prompts; we chose lengths. Gateways that share nothing also get "
        "no KV events.",
    ),
)  # fmt: skip
