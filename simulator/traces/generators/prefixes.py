"""Prompts with shared prefixes, as the benchmarks of SGLang, vLLM and others make them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from random import Random
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from simulator.traces.generators.common import (
    Arrivals,
    Count,
    Made,
    Rate,
    Ratio,
    Requests,
    Seconds,
    Shape,
    Talk,
    Turn,
    at_rate,
    block_for,
    check_corpus,
    check_prompt,
    check_total,
    in_stages,
    parse_stages,
    span,
    turn_job,
    turns,
)
from simulator.traces.job import Job, TraceError
from simulator.traces.mooncake import MAX_PROMPT_TOKENS
from simulator.traces.options import Size
from simulator.traces.timing import NS


class SglangKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `generated-shared-prefix` workload of SGLang's bench_serving (2024), with its
    defaults.
    """

    groups: Annotated[Count, Meta(description="number of system prompts")] = 64
    prompts: Annotated[Count, Meta(description="prompts of each group")] = 16
    system: Annotated[Size, Meta(description="tokens of the system prompt that a group shares")] = (
        Size(2048)
    )
    question: Annotated[Size, Meta(description="tokens of the question in each turn")] = Size(128)
    output: Annotated[Size, Meta(description="tokens of an answer")] = Size(256)
    range_ratio: Annotated[
        Ratio,
        Meta(description="smallest size as a share of the largest; 1: all sizes are equal"),
    ] = 1.0
    turns: Annotated[Count, Meta(description="turns of each prompt's conversation")] = 1
    gap_s: Annotated[
        Seconds,
        Meta(description="seconds between turns in an open loop; a closed loop has no pause"),
    ] = 10.0
    ordered: Annotated[
        bool, Meta(description="whether groups are sent one after another, not shuffled")
    ] = False
    rate: Annotated[
        Rate, Meta(description="conversations that begin per second; inf: all at once")
    ] = math.inf
    burstiness: Annotated[
        Shape,
        Meta(description="gamma shape of the gaps between arrivals; 1: Poisson, inf: even"),
    ] = 1.0


class VllmKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `prefix_repetition` workload of vLLM's benchmark (2025), with its defaults."""

    prefix: Annotated[Size, Meta(description="tokens of a prefix")] = Size(256)
    suffix: Annotated[Size, Meta(description="prompt tokens that only one request has")] = Size(256)
    prefixes: Annotated[
        Count, Meta(description="number of prefixes, which have equal shares of requests")
    ] = 10
    output: Annotated[Size, Meta(description="tokens of an answer")] = Size(128)
    requests: Annotated[
        Requests, Meta(description="number of requests, rounded down to a multiple of prefixes")
    ] = 1000
    rate: Annotated[Rate, Meta(description="requests per second; inf: all at once")] = math.inf
    burstiness: Annotated[
        Shape,
        Meta(description="gamma shape of the gaps between arrivals; 1: Poisson, inf: even"),
    ] = 1.0


class SharedKeys(VllmKeys, frozen=True, forbid_unknown_fields=True):
    """Requests that share one system prompt: a policy of prefix affinity alone makes a
    hot spot.
    """

    prefix: Annotated[Size, Meta(description="tokens of a prefix")] = Size(6016)
    suffix: Annotated[Size, Meta(description="prompt tokens that only one request has")] = Size(
        700, "*", 0.6
    )
    prefixes: Annotated[
        Count, Meta(description="number of prefixes, which have equal shares of requests")
    ] = 1
    output: Annotated[Size, Meta(description="tokens of an answer")] = Size(170, "*", 0.6)
    requests: Annotated[
        Requests, Meta(description="number of requests, rounded down to a multiple of prefixes")
    ] = 4000
    rate: Annotated[Rate, Meta(description="requests per second; inf: all at once")] = 50.0


def sglang(keys: SglangKeys, seed: int, block: int | None) -> Made:
    """Make `groups` x `prompts` conversations; each question is distinct."""
    system, question, output = (
        _ranged(size, keys.range_ratio) for size in (keys.system, keys.question, keys.output)
    )
    check_prompt(system, question)
    total: int | None = check_total(keys.groups * keys.prompts * keys.turns)
    check_corpus(keys.groups * keys.prompts)
    random = Random(f"sglang {seed}")
    block = block or block_for([system])
    heads = array("l", (system.draw(random) for _ in range(keys.groups)))
    order = _order(keys.groups, keys.prompts, None if keys.ordered else random)
    times = at_rate(keys.rate, len(order), random, keys.burstiness)
    if keys.turns == 1:
        jobs = _single(order, times, heads, question, output, block, random)
    else:
        starts = _talks(order, times, heads, question, keys.turns, block, random)
        gap_ns = round(keys.gap_s * NS)

        def take(_: Talk) -> Turn:
            return Turn(max(1, output.draw(random)), question.draw(random), gap_ns, think_ns=0)

        jobs = turns(starts, take, block, MAX_PROMPT_TOKENS)
        if system.most + keys.turns * (question.most + output.most) > MAX_PROMPT_TOKENS:
            total = None  # some conversations end early
    return Made(jobs, block, total, _origin(keys))


def vllm(keys: VllmKeys, seed: int, block: int | None) -> Made:
    """Make `requests` prompts with equal shares of the prefixes."""
    check_prompt(keys.prefix, keys.suffix)
    check_corpus(keys.requests)
    each = keys.requests // keys.prefixes
    if not each:
        raise TraceError(f"requests={keys.requests}: expected one per prefix or more")
    random = Random(f"vllm {seed}")
    block = block or block_for([keys.prefix])
    heads = array("l", (keys.prefix.draw(random) for _ in range(keys.prefixes)))
    order = _order(keys.prefixes, each, random)
    times = at_rate(keys.rate, len(order), random, keys.burstiness)
    jobs = _single(order, times, heads, keys.suffix, keys.output, block, random)
    return Made(jobs, block, len(order), _origin(keys))


def _ranged(size: Size, ratio: float) -> Size:
    if ratio == 1.0 or not size.fixed:
        return size
    return Size(max(1, round(size.mean * ratio)), "..", max(1, size.mean))


def _order(groups: int, each: int, random: Random | None) -> array[int]:
    order = array("l", (group for group in range(groups) for _ in range(each)))
    if random is not None:
        random.shuffle(order)
    return order


def _single(
    order: array[int],
    times: Iterator[int],
    heads: array[int],
    question: Size,
    output: Size,
    block: int,
    random: Random,
) -> Iterator[Job]:
    for serial, (group, at_ns) in enumerate(zip(order, times, strict=True)):
        tokens = max(1, heads[group] + question.draw(random))
        own = len(heads) + serial
        yield shared_then_own(
            at_ns, group, heads[group], own, tokens, max(1, output.draw(random)), block
        )


def shared_then_own(
    at_ns: int, part: int, shared_tokens: int, own: int, tokens: int, output: int, block: int
) -> Job:
    """Return a job with a prompt of `tokens` tokens: the first `shared_tokens` come from the shared
    part `part`, the rest from the part `own`.
    """
    shared = min(shared_tokens, tokens) // block
    ids = np.concatenate((span(part, 0, shared), span(own, shared, -(-tokens // block))))
    return Job(at_ns, tokens, output, ids)


def _talks(
    order: array[int],
    times: Iterator[int],
    heads: array[int],
    question: Size,
    count: int,
    block: int,
    random: Random,
) -> Iterator[tuple[int, Talk]]:
    for serial, (group, at_ns) in enumerate(zip(order, times, strict=True)):
        tokens = max(1, heads[group] + question.draw(random))
        own = len(heads) + serial
        yield at_ns, Talk(serial, group, heads[group] // block, own, tokens, count)


def _origin(keys: msgspec.Struct) -> str:
    values = msgspec.structs.asdict(keys)
    return ", ".join(f"{key} {value}" for key, value in values.items())


class InferencePerfKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `shared_prefix` workload of inference-perf, with its defaults except for the stages."""

    groups: Annotated[Count, Meta(description="number of system prompts")] = 10
    prompts: Annotated[Count, Meta(description="prompts of each group")] = 10
    system: Annotated[Size, Meta(description="tokens of the system prompt that a group shares")] = (
        Size(100)
    )
    question: Annotated[Size, Meta(description="tokens of the question in each turn")] = Size(50)
    output: Annotated[Size, Meta(description="tokens of an answer")] = Size(50)
    multi_turn: Annotated[
        bool, Meta(description="whether a repeated prompt is the next turn of a conversation")
    ] = False
    max_prompt: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_PROMPT_TOKENS,
            description="longest prompt, tokens; longer conversations begin anew",
        ),
    ] = 131_072
    stages: Annotated[str, Meta(description="stages of the load: rate:seconds,rate:seconds")] = (
        "1:60"
    )
    warm_ups: Annotated[
        int, Meta(ge=0, description="number of first stages that the report leaves out")
    ] = 0
    pause_s: Annotated[Seconds, Meta(description="seconds between two stages")] = 1.0
    arrivals: Annotated[Arrivals, Meta(description="how requests arrive: poisson or even")] = (
        "poisson"
    )


class LlmdKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of llm-d's published workloads, with its load stages.

    The original tool waits for all answers of a stage before the next stage. The generator has a
    long pause between stages instead, so that no stage begins with the queue of the stage before.
    """

    case: Annotated[
        Literal["150x5", "83x3"],
        Meta(description="llm-d's report: 150x5 (73 % of capacity) or 83x3 (37 %)"),
    ] = "150x5"
    stages: Annotated[
        str,
        Meta(description="stages of the load: rate:seconds,...; default: the report's"),
    ] = ""
    pause_s: Annotated[Seconds, Meta(description="seconds between two stages")] = 300.0


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
    """Make the prompts and loads of llm-d's reports: 7,200 and 9,000 tokens in, 1,000 out."""
    case = LLMD_150X5 if keys.case == "150x5" else LLMD_83X3
    told = {"pause_s": keys.pause_s}
    if keys.stages:
        told |= {"stages": keys.stages, "warm_ups": 0}  # type: ignore[dict-item]
    return inference_perf(msgspec.structs.replace(case, **told), seed, block)


def inference_perf(keys: InferencePerfKeys, seed: int, block: int | None) -> Made:
    """Make `groups` x `prompts` prompts, shuffled once, then repeated in order until the stages
    end.
    """
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
