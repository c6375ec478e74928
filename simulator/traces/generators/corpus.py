"""A fixed set of prompts with shared prefixes, asked again and again through a ladder of loads.

`shared_prefix` of inference-perf (Kubernetes wg-serving, 2025), and the two published workloads
of llm-d that it made: the 150 x 5 and the 83 x 3 prompts of the "73 %" and "37 % capacity" reports.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from random import Random
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from simulator.traces.generators.arrivals import in_stages, parse_stages
from simulator.traces.generators.keys import (
    Arrivals,
    Count,
    Made,
    Seconds,
    check_corpus,
    check_prompt,
)
from simulator.traces.generators.prefixes import shared_then_own
from simulator.traces.generators.segments import block_for
from simulator.traces.generators.talk import Talk, turn_job
from simulator.traces.job import Job
from simulator.traces.mooncake import MAX_PROMPT_TOKENS
from simulator.traces.size import Size


class InferencePerfKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`shared_prefix` of inference-perf, with its defaults but for the stages, which are asked."""

    groups: Annotated[Count, Meta(description="system prompts")] = 10
    prompts: Annotated[Count, Meta(description="prompts of each group")] = 10
    system: Annotated[Size, Meta(description="tokens a group shares")] = Size(100)
    question: Annotated[Size, Meta(description="tokens of its own, per turn")] = Size(50)
    output: Annotated[Size, Meta(description="tokens of an answer")] = Size(50)
    multi_turn: Annotated[
        bool, Meta(description="a prompt that comes again is its conversation's next turn")
    ] = False
    max_prompt: Annotated[
        int, Meta(ge=1, le=MAX_PROMPT_TOKENS, description="then a conversation begins anew")
    ] = 131_072
    stages: Annotated[str, Meta(description="rate:seconds,rate:seconds")] = "1:60"
    warm_ups: Annotated[int, Meta(ge=0, description="stages at the start not to report")] = 0
    pause_s: Annotated[Seconds, Meta(description="between stages")] = 1.0
    arrivals: Annotated[Arrivals, Meta(description="poisson or even")] = "poisson"


class LlmdKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of llm-d's published workloads, with its ladder.

    The tool that made them waits until a stage's answers have come before it goes on; a pause
    that is long enough stands for that, so that no stage inherits the queue of the one before.
    """

    case: Annotated[Literal["150x5", "83x3"], Meta(description="which report: 73 % or 37 %")] = (
        "150x5"
    )
    stages: Annotated[str, Meta(description="instead of the report's: rate:seconds,...")] = ""
    pause_s: Annotated[Seconds, Meta(description="between stages")] = 300.0


LLMD_150X5 = InferencePerfKeys(
    groups=150,
    prompts=5,
    system=Size(6000),
    question=Size(1200),
    output=Size(1000),
    stages="15:50,3:20,10:20,15:20,20:38,22:34,25:30,30:25,35:21,40:38,43:36,46:33,49:30,52:29,"
    "55:27,57:26,60:25",
    warm_ups=1,
)
LLMD_83X3 = InferencePerfKeys(
    groups=83,
    prompts=3,
    system=Size(8000),
    question=Size(1000),
    output=Size(1000),
    stages="9:30,3:210,4:180,5:120,6:120,8:90,10:70,12:60,15:50,20:50",
    warm_ups=1,
    arrivals="even",
)


def llmd(keys: LlmdKeys, seed: int, block: int | None) -> Made:
    """The reports' prompts and loads: 7,200 and 9,000 tokens in, 1,000 out."""
    case = LLMD_150X5 if keys.case == "150x5" else LLMD_83X3
    told = {"pause_s": keys.pause_s}
    if keys.stages:
        told |= {"stages": keys.stages, "warm_ups": 0}  # type: ignore[dict-item]
    return inference_perf(msgspec.structs.replace(case, **told), seed, block)


def inference_perf(keys: InferencePerfKeys, seed: int, block: int | None) -> Made:
    """`groups` x `prompts` prompts, shuffled once, then cycled through until the stages end."""
    check_prompt(keys.system, keys.question)
    check_corpus(keys.groups * keys.prompts)
    stages = parse_stages(keys.stages, keys.pause_s, keys.warm_ups)
    random = Random(f"inference_perf {seed}")
    block = block or block_for([keys.system])
    jobs = _cycled(keys, in_stages(stages, random, keys.arrivals == "even"), block, random)
    origin = (
        f"{keys.groups} x {keys.prompts} prompts, {keys.system} shared + {keys.question} own "
        f"tokens, {keys.output} output tokens, {keys.arrivals} arrivals in stages {keys.stages}"
    )
    total = sum(stage.requests for stage in stages)
    return Made(jobs, block, total, origin, stages)


def _cycled(
    keys: InferencePerfKeys, times: Iterator[int], block: int, random: Random
) -> Iterator[Job]:
    corpus = keys.groups * keys.prompts
    heads = array("l", (keys.system.draw(random) for _ in range(keys.groups)))
    first = array("l", (keys.question.draw(random) for _ in range(corpus)))
    outputs = array("l", (max(1, keys.output.draw(random)) for _ in range(corpus)))
    order = array("l", range(corpus))
    random.shuffle(order)
    prompts = array("l", (heads[i // keys.prompts] + first[i] for i in range(corpus)))
    begun = array("l", [0]) * corpus  # how often a conversation began anew
    for count, at_ns in enumerate(times):
        item = order[count % corpus]
        group = item // keys.prompts
        tokens = max(1, prompts[item])
        own = keys.groups + item + begun[item] * corpus
        if not keys.multi_turn:
            yield shared_then_own(at_ns, group, heads[group], own, tokens, outputs[item], block)
            continue
        answer = max(1, keys.output.draw(random))
        talk = Talk(item + begun[item] * corpus, group, heads[group] // block, own, tokens, 1)
        yield turn_job(talk, at_ns, answer, block)
        prompts[item] = tokens + answer + keys.question.draw(random)
        if prompts[item] > keys.max_prompt:
            prompts[item] = heads[group] + first[item]
            begun[item] += 1
