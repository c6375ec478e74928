"""Published results on agents whose next turn begins once the answer has come (a closed loop)."""

from __future__ import annotations

from statistics import fmean

from tests.simulator.anchors.ladders import KV_TOKENS
from tests.simulator.anchors.record import Anchor, Compared, Hardware, Measured
from tests.simulator.anchors.runs import Pool, number, row
from tests.simulator.anchors.slots import held, per_second

QWEN_10 = Hardware("10 x 2 H100, Qwen3-32B", "qwen3-32b-h100-tp2")
NEMOTRON = Hardware(
    "12 x 2 GPUs, Nemotron-3-Super-120B-A12B", "nemotron-3-super-120b-tp2", "gpt-oss-120b-h200"
)


def pool_of(workers: int) -> Pool:
    """Return `workers` workers like those of the published result, with the KV capacity of llm-d's
    other reports.
    """
    return Pool(workers, QWEN_10.profile, KV_TOKENS)


def code(full: bool) -> Measured:
    """Compare the input tokens per second of two rules on long contexts that no session shares.
    Each rule runs with the number of sessions at which its published throughput stops growing.
    """
    part = 1 if full else 5
    shape = "gen:sessions?system=0&context=3000..100000&turns=5*0.6&question=1500&output=800"
    shape += "&think_s=0&max_prompt=120000"

    def input_rate(policy: str, slots: int) -> float:
        talks = 4 * slots
        source = f"{shape}&sessions={talks}&burst={talks}"
        return per_second(held(source, policy, pool_of(10 // part), slots), "prompt_tokens")

    sticky, blind = (input_rate("llm_d_sticky", 60 // part), input_rate("round_robin", 30 // part))
    return Measured(sticky > blind, (part * sticky / 1000, sticky / blind))


def reasoning(full: bool) -> Measured:
    """Compare the output of two rules on short prompts with long answers, where affinity must cost
    nothing.
    """
    part = 1 if full else 10

    def output_rate(policy: str, slots: int) -> float:
        source = "gen:sessions?case=reasoning"
        source += f"&sessions={3 * slots}&burst={3 * slots}"
        source += "" if full else "&output=2000"
        return per_second(held(source, policy, pool_of(10 // part), slots), "output_tokens")

    sticky, blind = (
        output_rate("llm_d_sticky", 350 // part), output_rate("round_robin", 250 // part)
    )  # fmt: skip
    return Measured(sticky > 0.9 * blind, (sticky / blind,))


def rollouts(full: bool) -> Measured:
    """Compare a hash of the session with a rule that knows cache and load, for sessions that all
    start at once. The figure is the time that all of them take.
    """
    source = "gen:agentic?sessions=610&burst=610&system=0&context=8000*0.6&question=1000*0.8"
    source += "&output=300*0.8&think_s=0&pause_s=0&max_prompt=120000"
    source += "&turns=10*0.51" if full else "&turns=2"
    pool = Pool(12, NEMOTRON.profile, 3_000_000)
    seeds = range(3 if full else 1)
    hashed, aware = (
        [row(source, policy, pool, seed=seed, closed_loop=True) for seed in seeds]
        for policy in ("chwbl?load_factor=1000", "cache_aware")
    )
    wall = sum(one.simulated_s for one in hashed) / sum(one.simulated_s for one in aware)
    found = fmean(number(one.hit_rate_tokens) for one in hashed)
    found /= fmean(number(one.hit_rate_tokens) for one in aware)
    skew = [max(number(one.load_skew_requests) for one in rows) for rows in (hashed, aware)]
    ordered = wall > 1 if full else skew[0] > skew[1]  # with few turns chance decides it
    return Measured(ordered, (wall, found))


SLOW = (
    "Our replay has a higher throughput than the source under both rules, and most of all under "
    "round robin. The source's 16,000 tokens/s with 30 conversations mean 100 s for each turn. By "
    "the source's own rates a prefill of 57,000 tokens and 800 decode steps take 30 s of the 100 "
    "s. The source does not explain the other 70 s; pauses or a limit of held requests would."
)
ANCHORS = (
    Anchor(
        "llm-d-code-2026",
        "llm-d, Sticky until saturated, code generation, 2026",
        QWEN_10, "conversations of 3,000 to 100,000 tokens, 1,500 in and 800 out a turn",
        "router = `llm_d_sticky`, round robin = `round_robin`",
        "router first, by input tokens/s",
        (
            Compared("thousand input tokens/s, router with 60 at a time", 46.0, SLOW),
            Compared("input, router with 60 / round robin with 30 at a time", 2.9, SLOW),
        ),
        code,
        reach="The source does not give turns, pauses and KV capacity. We took log-normal turns "
        "with a mean of 6, no pauses, and 307,328 KV tokens for each worker. Each slot runs four "
        "conversations in turn, and figures cover the middle half of the run.",
    ),
    Anchor(
        "llm-d-reasoning-2026",
        "llm-d, Sticky until saturated, reasoning, 2026",
        QWEN_10, "250 shared + 1,000 in, 8,000 out",
        "router = `llm_d_sticky`, round robin = `round_robin`",
        "alike, by output tokens/s",
        (
            Compared("output, router with 350 / round robin with 250 at a time", 1.03),
        ),
        reasoning,
    ),
    Anchor(
        "nemo-rollouts-2026",
        "NeMo RL and Gym, rollouts through vLLM's router, NVIDIA-NeMo/Gym#2570, 2026",
        NEMOTRON, "610 coding sessions at once, 5 to 99 turns (median 29)",
        "cache_aware = `cache_aware`, consistent_hash = `chwbl` without its bound",
        "cache_aware first, by the time of all sessions",
        (
            Compared("time of all sessions, consistent_hash / cache_aware", 1.12),
            Compared("hits, consistent_hash / cache_aware", 1.00, short=0.1),
        ),
        rollouts,
        reach="The replay has a third of the turns. The source does not give lengths; we took "
        "8,000 tokens for a first prompt, then 1,000 in and 300 out for each turn. Tools take no "
        "time in the replay, and caches evict nothing. Figures are of three seeds together; with "
        "one of the seeds consistent_hash is as fast as cache_aware (29 November 2026).",
    ),
)  # fmt: skip
