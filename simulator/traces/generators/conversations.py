"""Conversations with think time: the catalogue of inference-perf's `conversation_replay` (2026).

A system prompt that all share, a context of the conversation's own, then turns: each prompt is
the one before, its answer and a new question. Answers are known, so later turns find them cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from simulator.traces.generators.arrivals import at_rate
from simulator.traces.generators.keys import Count, Made, Rate, Seconds, check_prompt
from simulator.traces.generators.segments import block_for
from simulator.traces.generators.talk import Talk, Turn, turns
from simulator.traces.mooncake import MAX_PROMPT_TOKENS
from simulator.traces.size import Size
from simulator.traces.timing import NS

Case = Literal["chat", "code", "deep_research", "reasoning", "rag"]


class SessionKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Conversations as in inference-perf's catalogue; what is left out is as the case has it.

    Shared + own tokens, turns, in/out a turn, pause: chat 1,000 + 4,000, 4, 50/300, 45 s; code
    3,000 + 160,000, 2..100, 1,500/425, 15 s; deep_research 2,000 + 45,000, 15, 3,000/300, 25 s;
    reasoning 250 + 0, 1, 1,000/8,000; rag 500 + 0, 1, 15,000/500.
    """

    case: Annotated[Case, Meta(description="chat, code, deep_research, reasoning or rag")] = "chat"
    sessions: Annotated[Count, Meta(description="conversations")] = 1000
    rate: Annotated[Rate, Meta(description="conversations begun per second")] = 1.0
    system: Annotated[Size | None, Meta(description="tokens that all share")] = None
    context: Annotated[Size | None, Meta(description="tokens of the conversation's own")] = None
    turns: Annotated[Size | None, Meta(description="turns of a conversation")] = None
    question: Annotated[Size | None, Meta(description="tokens per turn")] = None
    output: Annotated[Size | None, Meta(description="tokens of an answer")] = None
    think_s: Annotated[
        Seconds | None, Meta(description="mean pause between turns, exponential")
    ] = None
    token_ms: Annotated[
        Seconds, Meta(description="open loop: what an answer is taken to last, per token")
    ] = 20.0
    max_prompt: Annotated[
        int, Meta(ge=1, le=MAX_PROMPT_TOKENS, description="a conversation ends before it")
    ] = 1_000_000


class _Case(msgspec.Struct, frozen=True):
    system: Size
    context: Size
    turns: Size
    question: Size
    output: Size
    think_s: float


# Of code the catalogue says "up to thousands of turns".
CASES = {
    "chat": _Case(Size(1000), Size(4000), Size(4), Size(50), Size(300), 45.0),
    "code": _Case(Size(3000), Size(160_000), Size(2, "..", 100), Size(1500), Size(425), 15.0),
    "deep_research": _Case(Size(2000), Size(45_000), Size(15), Size(3000), Size(300), 25.0),
    "reasoning": _Case(Size(250), Size(0), Size(1), Size(1000), Size(8000), 0.0),
    "rag": _Case(Size(500), Size(0), Size(1), Size(15_000), Size(500), 0.0),
}


def sessions(keys: SessionKeys, seed: int, block: int | None) -> Made:
    """`sessions` conversations that begin as a Poisson process; holds those under way.

    Arrivals of later turns are what an open loop would record: the answer at `token_ms` a token,
    then the pause. A closed loop takes the pause alone.
    """
    told = {
        name: value
        for name in _Case.__struct_fields__
        if (value := getattr(keys, name)) is not None
    }
    case = msgspec.structs.replace(CASES[keys.case], **told)
    check_prompt(case.system, case.context, case.question)
    random = Random(f"sessions {seed}")
    block = block or block_for([case.system])
    system = case.system.draw(random)

    def take(_: Talk) -> Turn:
        answer = max(1, case.output.draw(random))
        pause_s = random.expovariate(1 / case.think_s) if case.think_s else 0.0
        gap_ns = round(answer * keys.token_ms * 1e6 + pause_s * NS)
        return Turn(answer, case.question.draw(random), gap_ns, think_ns=round(pause_s * NS))

    starts = _starts(keys, case, system // block, system, random)
    jobs = turns(starts, take, block, keys.max_prompt)
    total = keys.sessions * case.turns.mean if case.turns.fixed else None
    longest = system + case.context.most + case.turns.most * (case.question.most + case.output.most)
    origin = (
        f"{keys.sessions} conversations ({keys.case}), {keys.rate:g} begun per second, "
        f"{case.turns} turns, {case.system} shared + {case.context} own tokens, "
        f"{case.question} in and {case.output} out a turn, {case.think_s:g} s between turns"
    )
    return Made(jobs, block, total if longest <= keys.max_prompt else None, origin)


def _starts(
    keys: SessionKeys, case: _Case, shared_blocks: int, system: int, random: Random
) -> Iterator[tuple[int, Talk]]:
    for serial, at_ns in enumerate(at_rate(keys.rate, keys.sessions, random)):
        tokens = max(1, system + case.context.draw(random) + case.question.draw(random))
        count = max(1, case.turns.draw(random))
        yield at_ns, Talk(serial, 0, shared_blocks, 1 + serial, tokens, count)
