"""Published results on Mooncake's traces of Kimi: the hit rates of caches, and two rules on real
GPUs.
"""

from __future__ import annotations

from engine.profiles import PROFILES
from simulator.limits.hits import hits
from simulator.traces.spec import WorkloadSpec
from simulator.workloads.open import open_jobs
from tests.simulator.anchors.record import TRACES, Anchor, Compared, Hardware, Measured
from tests.simulator.anchors.runs import Pool, number, row

CONVERSATION = TRACES / "mooncake_conversation.jsonl.gz"
TOOLS = TRACES / "toolagent_surrogate.jsonl.gz"
QWEN_FP8 = Hardware("8 x H100, Qwen3-32B in FP8", "qwen3-32b-fp8-h100")
MINIMAX = Hardware(
    "32 x B200, MiniMax-M2.5 in FP8, simulated", "minimax-m2.5-fp8-b200-tp4",
    "qwen3-235b-a22b-fp8-h200-tp4",
)  # fmt: skip
NONE = Hardware("none: caches alone", "")
PART = 2000  # requests of a shortened replay


def hit_rates(rules: tuple[str, ...], full: bool) -> list[float]:
    """Return the token hit rates of ten caches of 3 M tokens under each of `rules`, for both traces
    one after the other.
    """
    found = []
    for path in (CONVERSATION, TOOLS):
        spec = WorkloadSpec(str(path), requests=None if full else PART)
        stream = open_jobs(spec, 0)
        rows = hits(
            stream.jobs, block_tokens=stream.block_tokens, workers=10, kv_tokens=3_000_000,
            rules=rules,
        )  # fmt: skip
        found += [one.hit_rate_tokens for one in rows]
    return found


def caches(full: bool) -> Measured:
    """Measure the best hit rate that each trace allows, and compare one cache for the pool with a
    cache for each worker.
    """
    chat, chat_pool, chat_own, tools, tools_pool, tools_own = hit_rates(
        ("ideal", "pooled_lru", "greedy"), full
    )
    ratios = (chat_pool / chat_own, tools_pool / tools_own)
    ordered = chat < tools and min(ratios) > 1
    return Measured(ordered, (chat, tools, *ratios) if full else (None, None, *ratios))


def two_rules(full: bool) -> Measured:
    """Compare round robin with Dynamo's rule on the tool-and-agent trace, played at 0.8 of its
    speed.
    """
    profile = PROFILES[QWEN_FP8.profile]
    pool = Pool(8, profile.name, 2 * profile.kv_capacity_tokens)  # FP8: half the profile's bytes
    blind, aware = (
        row(
            str(TOOLS), policy, pool, block_size=64, speed=0.8, requests=None if full else PART
        )
        for policy in ("round_robin", "dynamo")
    )  # fmt: skip
    first = number(blind.ttft_ms.mean) / number(aware.ttft_ms.mean)
    whole = number(blind.e2e_ms.mean) / number(aware.e2e_ms.mean)
    return Measured(first > 1 and whole > 1, (first, whole))


def reuse(full: bool) -> Measured:
    """Compare the hit rates of round robin and of Dynamo's rule, with caches of a million tokens a
    worker.
    """
    pool = Pool(8, MINIMAX.profile, 1_000_000)
    blind, aware = (
        row(str(TOOLS), policy, pool, block_size=None, requests=None if full else PART)
        for policy in ("round_robin", "dynamo")
    )
    found = number(blind.hit_rate_tokens), number(aware.hit_rate_tokens)
    sooner = number(aware.ttft_ms.mean) < number(blind.ttft_ms.mean)
    values = (found[0], found[1] / found[0]) if full else (None, None)
    return Measured(found[1] > found[0] and sooner, values)


SURROGATE = "The replay uses our surrogate of the tool-and-agent trace. "
OVERLOAD = (
    "The source's pool is overloaded under round robin (mean TTFT 64 s), and the ratio of TTFTs "
    "depends on how far beyond saturation the pool is. If workers have 0.7 of the profile's speed, "
    "our figures for the KV router are near the source's: mean TTFT 2.3 s (source 2.6), p99 15 s "
    "(18), mean time to the last token 16 s (19); round robin then has a mean TTFT of 17 s (29 "
    "November 2026). The source does not give the speed of its workers."
)
ANCHORS = (
    Anchor(
        "mooncake-caches-2025",
        "Mooncake, Qin et al., FAST 2025, table 2 and figures 9 and on",
        NONE, "conversation and tool-and-agent, 10 caches of 3 M tokens",
        "best match first = `greedy`, one pool = `pooled_lru`",
        "tool-and-agent reuses more; one pool before caches of their own",
        (
            Compared("cache ratio, conversation", 0.40),
            Compared("cache ratio, tool-and-agent", 0.59),
            Compared("hits of the pool / of own caches, conversation", 2.22),
            Compared("hits of the pool / of own caches, tool-and-agent", 1.38),
        ),
        caches, (CONVERSATION, TOOLS), SURROGATE,
    ),
    Anchor(
        "dynamo-ab-2026",
        "NVIDIA Dynamo, KV router A/B testing guide, 2026",
        QWEN_FP8, "tool-and-agent, 23,608 requests at 0.8 x their speed",
        "KV router = `dynamo`, off = `round_robin`",
        "KV router first, by mean TTFT and end to end",
        (
            Compared("mean TTFT, off / on", 24.6, OVERLOAD),
            Compared("mean time to the last token, off / on", 4.9, OVERLOAD),
        ),
        two_rules, (TOOLS,),
        SURROGATE + "With FP8 KV a worker holds twice as many tokens as in the profile, and reads "
        "each token as fast.",
    ),
    Anchor(
        "dynosim-2026",
        "DynoSim, design notes in the docs of ai-dynamo, 2026",
        MINIMAX, "tool-and-agent, 23,608 requests, 8 workers",
        "KV router = `dynamo`, round robin = `round_robin`",
        "KV router first, by reuse and by mean TTFT",
        (
            Compared("reuse under round robin", 0.38),
            Compared("reuse, KV router / round robin", 1.17),
        ),
        reuse, (TOOLS,),
        SURROGATE + "Workers have a million KV tokens each, and requests arrive at the recorded "
        "times. The source has 256 or 512 requests at a time and does not give the KV capacity.",
    ),
)  # fmt: skip
