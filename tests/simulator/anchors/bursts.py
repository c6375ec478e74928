"""Shared prompts: SGLang's burst, and one system prompt before everything."""

from __future__ import annotations

from tests.simulator.anchors.record import Anchor, Compared, Hardware, Measured
from tests.simulator.anchors.runs import Pool, number, row

A100 = Hardware("8 x A100-80, Llama-3.1-8B", "llama-3.1-8b-a100", "llama-3.1-8b-h100")


def burst(full: bool) -> Measured:
    """64 x 16 prompts at once, by turns and by SGLang's rule."""
    del full  # a second is short enough
    blind, aware = (
        row("gen:sglang", policy, Pool(8, A100.profile))
        for policy in ("round_robin", "cache_aware")
    )
    output = [number(one.output_tokens_per_s) for one in (aware, blind)]
    found = [number(one.hit_rate_tokens) for one in (aware, blind)]
    ordered = output[0] > output[1] and found[0] > found[1]
    return Measured(ordered, (found[0], found[1], output[0] / output[1]))


ROOM = (
    "Arithmetic: shuffled over 8 workers a group of 16 meets each of them 2.3 times, and one that "
    "computes every group it meets once finds 53 %. With room for 45,000 tokens a worker, a tenth "
    "of what such a GPU holds, round robin finds 24 % and the factor is 2.35 (29 November 2026); "
    "the source does not name such a limit."
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
)  # fmt: skip
