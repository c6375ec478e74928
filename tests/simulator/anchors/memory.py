"""llm-d's results on KV offloading: more shared prompts than the GPUs hold, with and without host
memory.
"""

from __future__ import annotations

from simulator.replay.result import ReplayResult
from simulator.report.row import summarize
from tests.simulator.anchors.ladders import QWEN, output
from tests.simulator.anchors.record import Anchor, Compared, Measured
from tests.simulator.anchors.runs import Pool, number, row, stages
from tests.simulator.anchors.slots import held, per_second

TIERS = "tests.simulator.anchors.rules:TierScorers"
GPU_TOKENS = 298_000  # of a server: 2,384,000 on eight
HOST_TOKENS = 819_200  # 200 GiB of a server, at 262,144 bytes a token


def tiers(full: bool) -> Measured:
    """Compare eight servers that hold KV in HBM alone with the same servers plus host memory. The
    short form has two servers.
    """
    part = 1 if full else 4
    count, groups = 8 // part, 250 // part
    rates = (10, 20, 40) if full else (20,)
    steps = ",".join(f"{rate / part:g}:50" for rate in (25, *rates))
    source = f"gen:inference_perf?groups={groups}&prompts=5&system=16000&question=256&output=256"
    source += f"&warm_ups=1&pause_s=300&stages={steps}"
    gpus, both = (
        stages(row(source, TIERS, Pool(count, QWEN.profile, GPU_TOKENS, host)))
        for host in (None, HOST_TOKENS)
    )
    ratios = {rate: output(both[rate / part]) / output(gpus[rate / part]) for rate in rates}
    sooner = all(number(both[rate].ttft_ms.mean) < number(gpus[rate].ttft_ms.mean) for rate in gpus)
    return Measured(sooner and min(ratios.values()) > 1, tuple(map(ratios.get, (10, 20, 40))))


def figures(found: ReplayResult) -> tuple[float, float, float]:
    """Return tokens per second (prompts and answers), the mean TTFT in ms and the mean time to the
    last token in ms.
    """
    summary = summarize(found)
    tokens = per_second(found, "prompt_tokens") + per_second(found, "output_tokens")
    return tokens, number(summary.ttft_ms.mean), number(summary.e2e_ms.mean)


def offload(full: bool) -> Measured:
    """Run 45 requests at a time, with shared prompts that exceed the GPUs' memory and with some
    that fit.
    """
    part = 1 if full else 4

    def ratios(system: int) -> list[float]:
        source = f"gen:inference_perf?groups={45 // part}&prompts=10&system={system}&question=256"
        source += f"&output=1024&stages=1:{900 // part}"
        alone, beside = (
            figures(held(source, TIERS, Pool(8 // part, QWEN.profile, 148_336, host), 45 // part))
            for host in (None, 656_000)
        )
        return [b / a for a, b in zip(alone, beside, strict=True)]

    large, small = ratios(30_000), ratios(8_000)
    ordered = large[2] < 1 and (not full or large[0] > 1)  # the short form cannot rank throughput
    return Measured(ordered, (large[0], large[2], large[1], small[0]))


EXACT = (
    "Our throughput is 15 % above the source's with host memory and 30 % above the source's "
    "without (29 November 2026). The caches of eight GPUs hold nearly all of the prompts, and our "
    "router gets an event for every eviction, where the source's scorers of 2025 estimated "
    "evictions. The source does not give hits."
)
ANCHORS = (
    Anchor(
        "llm-d-tiers-2026",
        "llm-d, guide to offloading the prefix cache to CPU memory, 2026",
        QWEN, "250 x 5 prompts, 16,000 + 256 in, 256 out, 10 to 40 requests/s",
        "its scorers of queue, KV and prefix in either tier, with HBM alone and with host memory",
        "host memory before none, by output and by mean TTFT",
        (
            Compared("throughput at 10 requests/s, with / without", 1.36),
            Compared("throughput at 20 requests/s, with / without", 2.62, short=0.5),
            Compared("throughput at 40 requests/s, with / without", 2.86),
        ),
        tiers,
        reach="The source does not give the length of stages; we took 50 s, which the source's "
        "mean TTFT and throughput imply. The source's host memory holds 819,200 tokens of this "
        "model. The replay leaves out the source's scorer that spreads uncached prompts.",
    ),
    Anchor(
        "llm-d-offload-2025",
        "llm-d, guide to offloading the prefix cache to CPU memory, first version, 2025",
        QWEN, "45 groups x 10 prompts, 30,000 (or 8,000) + 256 in, 1,024 out, 45 at a time",
        "its scorers of queue, KV and prefix in either tier, with HBM alone and with host memory",
        "host memory before none, by throughput and time to the last token, with long prompts",
        (
            Compared("throughput, with / without, prompts of 30,000", 1.21, short=0.35),
            Compared("time to the last token, with / without, prompts of 30,000", 0.82, short=0.35),
            Compared("mean TTFT, with / without, prompts of 30,000", 0.74, EXACT),
            Compared("throughput, with / without, prompts of 8,000", 0.98, short=0.1),
        ),
        offload,
        reach="As in the source, a server has room for 148,336 KV tokens on its GPUs and 656,000 "
        "in host memory. The source does not give the number of prompts; we send every prompt "
        "twice.",
    ),
)  # fmt: skip
