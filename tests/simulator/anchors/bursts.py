"""Published results on shared prompts: SGLang's burst, and agents that share one system prompt and
whose requests never overlap.
"""

from __future__ import annotations

from simulator.report.row import summarize
from tests.simulator.anchors.record import Anchor, Compared, Hardware, Measured
from tests.simulator.anchors.runs import Pool, number, row
from tests.simulator.anchors.slots import held

KIMI = Hardware("2 x 8 MI355X, Kimi-K3", "kimi-k3-mi355x-tp8", "deepseek-r1-h200-tp8")
A100 = Hardware("8 x A100-80, Llama-3.1-8B", "llama-3.1-8b-a100")


def burst(full: bool) -> Measured:
    """Replay 64 x 16 prompts that arrive at once under round robin and under SGLang's rule."""
    del full  # a second is short enough
    blind, aware = (
        row("gen:sglang", policy, Pool(8, A100.profile))
        for policy in ("round_robin", "cache_aware")
    )
    output = [number(one.output_tokens_per_s) for one in (aware, blind)]
    found = [number(one.hit_rate_tokens) for one in (aware, blind)]
    ordered = output[0] > output[1] and found[0] > found[1]
    return Measured(ordered, (found[0], found[1], output[0] / output[1]))


def alone(full: bool) -> Measured:
    """Replay one request at a time. The load then says nothing, so the worker that holds the common
    prompt gets all requests.
    """
    del full  # a second is short enough
    source = "gen:agentic?sessions=28&burst=28&turns=16&think_s=0&pause_s=0"
    pool = Pool(2, KIMI.profile)
    blind, aware = (summarize(held(source, rule, pool, 1)) for rule in ("round_robin", "dynamo"))
    most = [max(one.requests_per_worker) / one.requests for one in (aware, blind)]
    return Measured(most[0] > 0.9 > most[1], (most[0], most[1]))


ROOM = (
    "Under round robin a worker that gets prompts of a group gets 2.3 of the group's 16 prompts on "
    "average; if each worker computes a group's prefix once, hits are 53 % by arithmetic. With "
    "45,000 KV tokens for each worker, a tenth of the capacity of such a GPU, round robin has 24 % "
    "hits, and the ratio of outputs is 2.6 (29 November 2026). The source does not name such a "
    "limit."
)
ANCHORS = (
    Anchor(
        "sglang-burst-2024",
        "SGLang v0.4 blog and sgl-project/sglang#2170, 2024",
        A100, "64 x 16 prompts, 2,048 + 128 in, 256 out, all at once, shuffled",
        "cache-aware = `cache_aware`, round robin = `round_robin`",
        "cache-aware first, by output and by hits",
        (
            Compared("hits, cache-aware", 0.75, short=0.25),
            Compared("hits, round robin", 0.20, ROOM),
            Compared("output, cache-aware / round robin", 1.92, ROOM),
        ),
        burst,
    ),
    Anchor(
        "infera-one-worker-2026",
        "AMD Infera, kv-aware routing, AMD-AGI/Infera#103, 2026",
        KIMI, "448 requests of agents behind one prompt, never two at a time",
        "kv-aware = `dynamo`, round-robin = `round_robin`",
        "kv-aware gives one worker everything, round-robin half",
        (
            Compared("share of the busiest worker, kv-aware", 1.00, short=0.05),
            Compared("share of the busiest worker, round-robin", 0.50, short=0.05),
        ),
        alone,
        reach="The source does not give the sessions. We took 28 sessions of 16 turns behind "
        "10,000 shared tokens.",
    ),
)  # fmt: skip
