"""The demo's three acts: which workload, on which workers, for which policies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from simulator import CHECKOUT
from simulator.replay.setup import WorkloadSpec
from simulator.sample import SAMPLE_PATH
from simulator.stack import StackSettings
from simulator.workload import Workload, generated_shared_prefix, opened

TRACE_PATH = CHECKOUT.parent / "shared" / "traces" / "mooncake_conversation.jsonl.gz"
TICK_S = 3.0  # clock of the Mooncake trace: all requests of a tick bear one time
SEED = 1
CONVERSATION_KV_TOKENS = 1_000_000
AGENTS_KV_TOKENS = 94_000  # the agents' prompt and the contexts of some six of them
AGENTS_S = 100.0
# Memory binds, prefill does not: six agents a worker at once, and one more every 13 seconds.
AGENTS = (
    "gen:agentic?sessions={sessions}&burst={burst}&rate={rate:g}&turns=4..12&context=8000*0.5"
    "&question=1000*0.5&output=60*0.5&pause_s=0.5&think_s=1.5"
)
AGENTS_AT_ONCE = 6  # a worker
AGENTS_PER_S = 0.075  # a worker
AGENTS_HOLD_S = 120.0  # wall clock: longer than the act


@dataclass(frozen=True, slots=True)
class Act:
    """One workload and the policies it is run for. Lifetime: process."""

    workload: Workload
    policies: tuple[str, ...]
    settings: StackSettings


def acts(workers: int, speed: float, quick: bool, trace: Path | None) -> tuple[Act, Act, Act]:
    """A popular prompt, conversations, and agents in tight memory; raises `TraceError`.

    `speed` multiplies what each act has, `quick` takes a fifth of each. `trace` None: the Mooncake
    trace where it is at hand, else the sample that ships.
    """
    fifth = 5 if quick else 1
    stack = StackSettings(policy="", workers=workers)
    shared = Act(
        generated_shared_prefix(1, 500 // fifth, 6_000, 700, 24, 60.0, SEED),
        ("round_robin", "kv_prefix", "kv_load", "hybrid"),
        replace(stack, speed=1.0 * speed),
    )
    conversation = Act(
        _conversation(trace, 120.0 / fifth),
        ("round_robin", "hybrid"),
        replace(stack, speed=3.0 * speed, kv_tokens=CONVERSATION_KV_TOKENS),
    )
    few = max(1, workers // 2)  # fewer programs can run faster on the same cores
    agents = Act(
        _agents(few, AGENTS_S / fifth),
        ("kv_prefix", "hybrid", "warmset"),
        replace(
            stack,
            workers=few,
            speed=4.0 * speed,
            kv_tokens=AGENTS_KV_TOKENS,
            hold_s=AGENTS_HOLD_S,
        ),
    )
    return shared, conversation, agents


def _conversation(trace: Path | None, seconds: float) -> Workload:
    path = trace or (TRACE_PATH if TRACE_PATH.exists() else SAMPLE_PATH)
    spread_s = TICK_S if path.name.startswith("mooncake") else 0.0
    spec = WorkloadSpec(str(path), seconds=seconds, spread_s=spread_s, strict=True)
    origin = f"first {seconds:g} s of {path.name} at the times recorded"
    return opened(spec, "conversation", origin)


def _agents(workers: int, ends_s: float) -> Workload:
    burst, rate = AGENTS_AT_ONCE * workers, AGENTS_PER_S * workers
    origin = (
        f"agents that share a prompt of 10,000 tokens and have some 9,000 of their own, 4 to 12 "
        f"turns of some 1,100 more, two or three seconds between an answer and the next turn; "
        f"{burst} begin at once, then {rate:g} per second; no turn begins after {ends_s:g} s"
    )
    sessions = burst + round(2 * rate * ends_s)  # more than will have begun by then
    spec = WorkloadSpec(AGENTS.format(sessions=sessions, burst=burst, rate=rate))
    return opened(spec, "agents", origin, SEED, ends_s)
