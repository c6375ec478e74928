"""Generates conversations with think time: a system prompt that many share, a context of their own,
and turns.

Each prompt is the one before, its answer and a new question. Answers are known, so that later turns
find them cached. The cases of `gen:sessions` are those of inference-perf's `conversation_replay`
(2026); `gen:agentic` and `gen:tenants` stress a router's memory of sessions.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect
from collections.abc import Iterator
from itertools import chain, repeat
from random import Random
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from simulator.traces.generators.common import (
    Count,
    Made,
    Rate,
    Seconds,
    Talk,
    Turn,
    at_rate,
    block_for,
    check_prompt,
    turns,
)
from simulator.traces.generators.zipf import weights
from simulator.traces.job import TraceError
from simulator.traces.mooncake import MAX_PROMPT_TOKENS
from simulator.traces.options import MAX_SIGMA, Size
from simulator.traces.timing import NS

Case = Literal["chat", "code", "deep_research", "reasoning", "rag"]
Sessions = Annotated[Count, Meta(description="number of conversations")]
Begun = Annotated[Rate, Meta(description="conversations that begin per second")]
Tenants = Annotated[int, Meta(ge=1, le=100_000)]
Sigma = Annotated[float, Meta(ge=0, le=MAX_SIGMA)]
Exponent = Annotated[float, Meta(ge=0, le=10)]


class TalkKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of every kind of conversation; None means the value of the case."""

    sessions: Sessions = 1000
    rate: Begun = 1.0
    burst: Annotated[Count, Meta(description="conversations that begin together at the start")] = 1
    system: Annotated[
        Size | None, Meta(description="prompt tokens that all conversations share")
    ] = None
    context: Annotated[
        Size | None, Meta(description="prompt tokens that only one conversation has")
    ] = None
    turns: Annotated[Size | None, Meta(description="turns of a conversation")] = None
    question: Annotated[Size | None, Meta(description="tokens of the question in each turn")] = None
    output: Annotated[Size | None, Meta(description="tokens of an answer")] = None
    think_s: Annotated[
        Seconds | None, Meta(description="mean of the exponential pauses between turns")
    ] = None
    think_sigma: Annotated[
        Sigma | None,
        Meta(description="sigma of log-normal pauses, whose median is think_s"),
    ] = None
    pause_s: Annotated[Seconds | None, Meta(description="seconds added to every pause")] = None
    tenants: Annotated[
        Tenants | None, Meta(description="number of tenants; each tenant has its own system prompt")
    ] = None
    exponent: Annotated[
        Exponent | None,
        Meta(description="Zipf exponent of the tenants' shares; 0: equal shares"),
    ] = None
    token_ms: Annotated[
        Seconds, Meta(description="assumed time per token of an answer in an open loop")
    ] = 20.0
    max_prompt: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_PROMPT_TOKENS,
            description="longest prompt, tokens; conversations end before longer prompts",
        ),
    ] = 1_000_000


class SessionKeys(TalkKeys, frozen=True, forbid_unknown_fields=True):
    """Conversations as in inference-perf's catalogue. A key that is left out has the value of the
    case.

    Each case has shared + own tokens, turns, tokens in/out per turn, and a pause: chat 1,000 +
    4,000, 4, 50/300, 45 s; code 3,000 + 160,000, 2..100, 1,500/425, 15 s; deep_research 2,000 +
    45,000, 15, 3,000/300, 25 s; reasoning 250 + 0, 1, 1,000/8,000; rag 500 + 0, 1, 15,000/500.
    """

    case: Annotated[
        Case, Meta(description="kind of conversation: chat, code, deep_research, reasoning or rag")
    ] = "chat"


class AgenticKeys(TalkKeys, frozen=True, forbid_unknown_fields=True):
    """Agents that share one long prompt and have much context of their own and many quick turns.

    The defaults are 10,000 shared and 6000*0.6 own tokens, 2..20 turns of 1500*0.6 tokens in and
    90*0.6 out, and between turns 1 s and a log-normal pause of median 3 s (sigma 0.6). A source
    has some 6,000 requests.
    """

    sessions: Sessions = 545
    rate: Begun = 0.45


class TenantsKeys(TalkKeys, frozen=True, forbid_unknown_fields=True):
    """Chats of a few large and many small customers, each with a system prompt of its own.

    The defaults are 20 tenants (Zipf 1.1) with 2,560 shared tokens each, 1..7 turns of 400*0.6
    tokens in and 220*0.6 out, and between turns 5 s and a log-normal pause of median 10 s (sigma
    0.6). A source has some 6,000 requests.
    """

    sessions: Sessions = 1500
    rate: Begun = 10.0


class _Case(msgspec.Struct, frozen=True):
    system: Size
    context: Size
    turns: Size
    question: Size
    output: Size
    think_s: float
    think_sigma: float | None = None  # None: pauses are exponential
    pause_s: float = 0.0
    tenants: int = 1
    exponent: float = 1.0


# Of code the catalogue says "up to thousands of turns".
CASES = {
    "chat": _Case(Size(1000), Size(4000), Size(4), Size(50), Size(300), 45.0),
    "code": _Case(Size(3000), Size(160_000), Size(2, "..", 100), Size(1500), Size(425), 15.0),
    "deep_research": _Case(Size(2000), Size(45_000), Size(15), Size(3000), Size(300), 25.0),
    "reasoning": _Case(Size(250), Size(0), Size(1), Size(1000), Size(8000), 0.0),
    "rag": _Case(Size(500), Size(0), Size(1), Size(15_000), Size(500), 0.0),
}
AGENTIC = _Case(
    Size(10_000), Size(6000, "*", 0.6), Size(2, "..", 20), Size(1500, "*", 0.6), Size(90, "*", 0.6),
    think_s=3.0, think_sigma=0.6, pause_s=1.0,
)  # fmt: skip
TENANTS = _Case(
    Size(2560), Size(0), Size(1, "..", 7), Size(400, "*", 0.6), Size(220, "*", 0.6),
    think_s=10.0, think_sigma=0.6, pause_s=5.0, tenants=20, exponent=1.1,
)  # fmt: skip


def sessions(keys: SessionKeys, seed: int, block: int | None) -> Made:
    """Make the conversations of one of inference-perf's cases."""
    return _conversations(keys, keys.case, CASES[keys.case], seed, block)


def agentic(keys: AgenticKeys, seed: int, block: int | None) -> Made:
    """Make the sessions of agents."""
    return _conversations(keys, "agentic", AGENTIC, seed, block)


def tenants(keys: TenantsKeys, seed: int, block: int | None) -> Made:
    """Make the chats of many tenants."""
    return _conversations(keys, "tenants", TENANTS, seed, block)


def _conversations(keys: TalkKeys, name: str, usual: _Case, seed: int, block: int | None) -> Made:
    """Make `sessions` conversations whose starts are a Poisson process; only conversations in
    progress are held.

    Later turns arrive as an open loop would record them: after the answer at `token_ms` a token,
    then the pause. A closed loop takes the pause alone.
    """
    told = {
        name: value
        for name in _Case.__struct_fields__
        if (value := getattr(keys, name)) is not None
    }
    case = msgspec.structs.replace(usual, **told)
    check_prompt(case.system, case.context, case.question)
    if keys.burst > keys.sessions:
        raise TraceError(f"burst {keys.burst}: expected at most the {keys.sessions} sessions")
    random = Random(f"sessions {seed}")
    block = block or block_for([case.system])
    heads = array("l", (case.system.draw(random) for _ in range(case.tenants)))

    def take(_: Talk) -> Turn:
        answer = max(1, case.output.draw(random))
        pause_s = _pause_s(case, random)
        gap_ns = round(answer * keys.token_ms * 1e6 + pause_s * NS)
        return Turn(answer, case.question.draw(random), gap_ns, think_ns=round(pause_s * NS))

    jobs = turns(_starts(keys, case, block, heads, random), take, block, keys.max_prompt)
    total = keys.sessions * case.turns.mean if case.turns.fixed else None
    longest = max(heads) + case.context.most
    longest += case.turns.most * (case.question.most + case.output.most)
    return Made(
        jobs, block, total if longest <= keys.max_prompt else None, _description(keys, name, case)
    )


def _description(keys: TalkKeys, name: str, case: _Case) -> str:
    many = f"{case.tenants} tenants, " if case.tenants > 1 else ""
    many = f"{keys.burst} of them at once, {many}" if keys.burst > 1 else many
    return (
        f"{keys.sessions} conversations ({name}), {keys.rate:g} begun per second, {many}"
        f"{case.turns} turns, {case.system} shared + {case.context} own tokens, "
        f"{case.question} in and {case.output} out a turn, {case.pause_s + case.think_s:g} s "
        "between turns"
    )


def _pause_s(case: _Case, random: Random) -> float:
    if case.think_sigma is not None:
        return case.pause_s + case.think_s * math.exp(random.gauss(0.0, case.think_sigma))
    return case.pause_s + (random.expovariate(1 / case.think_s) if case.think_s else 0.0)


def _starts(
    keys: TalkKeys, case: _Case, block: int, heads: array[int], random: Random
) -> Iterator[tuple[int, Talk]]:
    shares = weights(case.tenants, case.exponent)
    later = at_rate(keys.rate, keys.sessions - keys.burst + 1, random)
    for serial, at_ns in enumerate(chain(repeat(0, keys.burst - 1), later)):
        number, tenant = 0, None
        if case.tenants > 1:
            number = bisect(shares, random.random() * shares[-1])
            tenant = f"tenant-{number}"
        own = case.context.draw(random) + case.question.draw(random)
        tokens = max(1, heads[number] + own)
        count = max(1, case.turns.draw(random))
        talk = Talk(
            serial, number, heads[number] // block, case.tenants + serial, tokens, count,
            tenant=tenant,
        )  # fmt: skip
        yield at_ns, talk
