"""llm-d's KV offloading: more shared prompts than the GPUs hold, with and without host memory."""

from __future__ import annotations

from tests.simulator.anchors.ladders import QWEN, output
from tests.simulator.anchors.record import Anchor, Compared, Measured
from tests.simulator.anchors.runs import Pool, number, row, stages

TIERS = "tests.simulator.anchors.rules:TierScorers"
GPU_TOKENS = 298_000  # of a server: 2,384,000 on eight
HOST_TOKENS = 819_200  # 200 GiB of a server, at 262,144 bytes a token


def tiers(full: bool) -> Measured:
    """The HBM of eight servers alone, and with the memory of their hosts; shortened, of two."""
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
        reach="Stages of 50 s, which mean TTFT and throughput of the source imply: it does not "
        "say. Its host memory holds 819,200 tokens, by the bytes of a token of this model.",
    ),
)  # fmt: skip
