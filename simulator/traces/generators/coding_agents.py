"""People who work with coding agents: each has a main agent, its sub-agents and side requests.

Prompts have layers: tools and system prompt, which all users of one client version share; the
description of the project; and the conversation. Prompts grow turn by turn, to hundreds of
thousands of tokens. They are reset now and then, and compacted when the model's limit is reached.
The shapes are log-normal fits to two published sets of Claude Code sessions: `file` to 592 recorded
ones (callanjfox/kv-cache-tester, 94f6046), `heavy` to the percentiles of 219 (llm-d's blog, 22 July
2026). Sub-agents share nothing with their parents; they share tools and system prompt with all
other sub-agents of their version.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace
from itertools import chain, count, repeat
from random import Random
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from policies.contract import Hashes
from simulator.traces.generators.common import Count, Made, Rate, Ratio, Seconds, at_rate, span
from simulator.traces.generators.zipf import weights
from simulator.traces.job import NO_IDS, Job, TraceError
from simulator.traces.mooncake import MAX_PROMPT_TOKENS
from simulator.traces.options import Size
from simulator.traces.timing import NS

Preset = Literal["file", "heavy"]
Few = Annotated[int, Meta(ge=1, le=1000)]

BLOCK = 64  # tokens an id stands for: a million tokens in blocks of 16 would be slow to follow
MAX_LIMIT = 4_000_000  # with an answer still fewer blocks than `common.span` has ids for
MAX_TURNS = 2_000
MAX_GROWTH = 300_000
MAX_OUTPUT = 32_000
MAX_CHILDREN = 12
RESUMED_SHARE = 0.72  # of the model's limit that a resumed conversation has at most
RESET_TOKENS = 200_000  # a prompt of this length is reset twice as often as a short one
OWN_TOKENS = 500  # of a first prompt, at least
COMPACTED = 10_000  # tokens of its own that a compacted conversation keeps
FRESH = Size(21_000, "*", 0.35)  # first prompts, tokens ...
RESUMED = Size(280_000, "*", 0.6)  # ... and those of resumed conversations
ALONE = 0.7  # share of spawns that are of one sub-agent
MORE = 0.75  # probability of one more, where there are two or more
TOOL_SHARE = 0.88  # of a main agent's pauses that are a tool's; the others are people's
TOOL_PAUSE, HUMAN_PAUSE, CHILD_PAUSE = (1.8, 1.0), (70.0, 1.7), (4.0, 1.2)  # median s, sigma
CHILD_OWN = 1_300  # tokens of a sub-agent's task


class _Preset(NamedTuple):
    turns: Size
    resumed: float  # share of sessions
    leap: float  # share of turns in which a prompt grows much
    leap_factor: float
    spawn: float  # share of turns that start sub-agents


PRESETS: dict[Preset, _Preset] = {
    "file": _Preset(Size(44, "*", 1.05), 0.12, 0.02, 20.0, 0.001),
    "heavy": _Preset(Size(107, "*", 0.93), 0.2, 0.025, 150.0, 0.045),
}


class CodingAgentsKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sessions of coding agents: long prompts that grow, sub-agents and side requests.

    With `heavy`, main agents have 107 turns (median) and prompts of some 155,000 tokens, and half
    of the requests come from sub-agents. With `file`, main agents have 44 turns, prompts of some
    90,000 tokens and few sub-agents. A first prompt has 21000*0.35 tokens, or 280000*0.6 in
    sessions that are resumed (12 % with `file`, 20 % with `heavy`). Each turn adds 632*1.3 tokens;
    with `file` one turn in 50 adds 20 times as many, with `heavy` one turn in 40 adds 150 times as
    many. Pauses have a median of 1.8 s (log-normal, sigma 1), or of 70 s (sigma 1.7) after 12 % of
    the answers. A turn that starts sub-agents starts one sub-agent (70 %) or 2 to 12. In a closed
    loop sub-agents start when their parent's answer has come, and the parent continues when all
    its sub-agents have ended (`wait`) or at once. Agents compact prompts of more than `limit`
    tokens: set `limit` to the context length of your workers.
    """

    preset: Annotated[Preset, Meta(description="shape of the sessions: file or heavy")] = "heavy"
    sessions: Annotated[
        Count, Meta(description="number of people; each person has one main agent")
    ] = 60
    rate: Annotated[Rate, Meta(description="sessions that begin per second")] = 0.05
    burst: Annotated[Count, Meta(description="sessions that begin together at the start")] = 1
    limit: Annotated[int, Meta(ge=50_000, le=MAX_LIMIT, description="longest prompt, tokens")] = (
        900_000
    )
    turns: Annotated[Size | None, Meta(description="turns of a main agent")] = None
    growth: Annotated[
        Size, Meta(description="tokens that a turn of a main agent adds, with the answer")
    ] = Size(632, "*", 1.3)
    output: Annotated[Size, Meta(description="tokens of an answer")] = Size(317, "*", 1.31)
    reset: Annotated[
        Ratio,
        Meta(description="share of turns that begin a new context; long prompts raise the share"),
    ] = 0.004
    spawn: Annotated[Ratio | None, Meta(description="share of turns that start sub-agents")] = None
    wait: Annotated[
        Ratio,
        Meta(description="share of turns with sub-agents that wait for all sub-agents"),
    ] = 0.8
    agent_turns: Annotated[Size, Meta(description="turns of a sub-agent")] = Size(5, "*", 1.0)
    agent_growth: Annotated[Size, Meta(description="tokens that a turn of a sub-agent adds")] = (
        Size(2537, "*", 1.3)
    )
    side: Annotated[
        Ratio, Meta(description="share of turns with a side request, for a title or a summary")
    ] = 0.015
    side_prompt: Annotated[
        Size, Meta(description="prompt tokens of a side request; no other request shares them")
    ] = Size(1000, "..", 5000)
    side_output: Annotated[Size, Meta(description="tokens of the answer to a side request")] = Size(
        10, "..", 100
    )
    versions: Annotated[
        Few,
        Meta(description="number of client versions; shares follow Zipf's law"),
    ] = 3
    projects: Annotated[Few, Meta(description="number of projects; shares follow Zipf's law")] = 50
    exponent: Annotated[
        float, Meta(ge=0, le=10, description="Zipf exponent of the shares of versions and projects")
    ] = 1.2
    tools: Annotated[
        int,
        Meta(
            ge=1,
            le=30_000,
            description="tokens of the tools and the system prompt of a client version",
        ),
    ] = 15_000
    project: Annotated[int, Meta(ge=0, le=10_000, description="tokens that describe a project")] = (
        7_000
    )
    agent_tools: Annotated[
        int,
        Meta(ge=1, le=30_000, description="tokens of the tools that a version's sub-agents have"),
    ] = 8_700
    gap_s: Annotated[
        Seconds, Meta(description="longest pause between turns, seconds; longer pauses are cut")
    ] = 3_600.0
    token_ms: Annotated[
        Seconds, Meta(description="assumed time per token of an answer in an open loop")
    ] = 20.0


def coding_agents(keys: CodingAgentsKeys, seed: int, block: int | None) -> Made:
    """Make sessions whose starts are a Poisson process; only sessions under way are held.

    Each session has random numbers of its own, so that another rate moves it and changes nothing
    else. Later turns arrive as an open loop would record them: after the answer at `token_ms` a
    token, the pause, and, if the agent waits for sub-agents, their end.
    """
    if keys.burst > keys.sessions:
        raise TraceError(f"burst {keys.burst}: expected at most the {keys.sessions} sessions")
    preset = PRESETS[keys.preset]
    if keys.turns is not None:
        preset = preset._replace(turns=keys.turns)
    if keys.spawn is not None:
        preset = preset._replace(spawn=keys.spawn)
    random = Random(f"coding agents {seed}")
    later = at_rate(keys.rate, keys.sessions - keys.burst + 1, random)
    starts = enumerate(chain(repeat(0, keys.burst - 1), later))
    world = _World(keys, preset, block or BLOCK)
    people = (
        (at_ns, _Person(world, serial, Random(f"coding agents {seed} {serial}")).jobs(at_ns))
        for serial, at_ns in starts
    )
    origin = (
        f"{keys.sessions} coding agents ({keys.preset}), {keys.rate:g} begun per second, "
        f"{preset.turns} turns, {keys.output} out a turn, {preset.spawn:.1%} of turns start "
        f"sub-agents, prompts to {keys.limit} tokens"
    )
    return Made(_merged(people), world.block, None, origin)


def _merged(people: Iterator[tuple[int, Iterator[Job]]]) -> Iterator[Job]:
    """Yield the jobs of all people in order of time. `people` has the start in ns and the jobs of
    each person, in ascending order of start.
    """
    due: list[tuple[int, int, Job, Iterator[Job]]] = []  # by time, then by who began first
    begun, upcoming = 0, next(people, None)
    while due or upcoming is not None:
        if upcoming is not None and (not due or upcoming[0] <= due[0][0]):
            first = next(upcoming[1])
            heappush(due, (first.at_ns, begun, first, upcoming[1]))
            begun, upcoming = begun + 1, next(people, None)
            continue
        _, number, job, jobs = due[0]
        yield job
        following = next(jobs, None)
        if following is None:
            heappop(due)
        else:
            heapreplace(due, (following.at_ns, number, following, jobs))


class _World:
    """The keys, presets and prompt parts that all simulated people share. Lifetime: stream.

    Ids are counted within a part (`common.span`). The parts are: the tools of each version, the
    tools of its sub-agents, the projects of each version, then one part for each conversation.
    """

    def __init__(self, keys: CodingAgentsKeys, preset: _Preset, block: int) -> None:
        self.keys, self.preset, self.block = keys, preset, block
        self.of_versions = weights(keys.versions, keys.exponent)
        self.of_projects = weights(keys.projects, keys.exponent)
        self._own = count(keys.versions * (2 + keys.projects))

    def own_part(self) -> int:
        """Return the number of a new part, which no other conversation has."""
        return next(self._own)


_Due = tuple[int, int, Job]  # time, order, job
Layer = tuple[int, int]  # a part, and at which token of the prompt it ends


class _Chain:
    """The prompts of one agent of a simulated person. The ids of turns that continue each other are
    slices of one array, so that they are stored once. Lifetime: its session.
    """

    def __init__(self, world: _World, person: Job, layers: tuple[Layer, ...], tokens: int) -> None:
        """Begin the prompts of an agent; `person` is a job with the names that all of its
        turns have.
        """
        self._world, self._person = world, person
        self.begin(layers, tokens)

    def begin(self, layers: tuple[Layer, ...], tokens: int) -> None:
        """Begin a new prompt of `tokens` tokens with these shared layers; the rest of it is new."""
        first, pieces = 0, []
        for part, end in layers:
            pieces.append(span(part, first, end // self._world.block))
            first += len(pieces[-1])
        self.tokens = tokens
        self._own = self._world.own_part()
        self._ids: Hashes = np.concatenate(pieces)

    def turn(
        self, at_ns: int, think_ns: int, answer: int, following: int | None, *awaited: str
    ) -> Job:
        """Return the job of the next turn. `following` is the number of tokens of the next prompt
        if it continues this one and its answer or is a beginning of them; else None.
        """
        block, tokens = self._world.block, self.tokens
        full = tokens // block
        end = (tokens + answer if following is None else min(tokens + answer, following)) // block
        if end > len(self._ids):
            known = len(self._ids)
            more = span(self._own, known, max(end, 2 * known))
            self._ids = np.concatenate((self._ids, more))
        if following is not None:
            self.tokens = following
        return msgspec.structs.replace(
            self._person,
            at_ns=at_ns,
            prompt_tokens=tokens,
            output_tokens=answer,
            ids=self._ids[:full],
            answer_ids=self._ids[full:end],
            think_ns=think_ns,
            waits_for=awaited,
        )


class _Person:
    """One session: a main agent with the sub-agents and side requests that it starts. Lifetime:
    session.
    """

    def __init__(self, world: _World, serial: int, random: Random) -> None:
        self._world, self._keys, self._random = world, world.keys, random
        self._name = str(serial)
        self._version = _ranked(world.of_versions, random)
        project = _ranked(world.of_projects, random)
        keys = self._keys
        self._project_part = keys.versions * 2 + self._version * keys.projects + project
        self._token_ns = keys.token_ms * 1e6
        self._children = self._sides = 0
        self._serials = count()

    def jobs(self, at_ns: int) -> Iterator[Job]:
        """Yield all requests of this person in order of time."""
        keys, preset, random = self._keys, self._world.preset, self._random
        tokens = self._first_tokens(RESUMED if random.random() < preset.resumed else FRESH)
        chain = _Chain(self._world, self._who(self._name), self._layers(tokens), tokens)
        others: list[_Due] = []  # that are on their way, by time
        think_ns = 0
        awaited: tuple[str, ...] = ()
        for left in range(_draw(preset.turns, random, MAX_TURNS), 0, -1):
            while others and others[0][0] <= at_ns:
                yield heappop(others)[2]
            answer = _draw(keys.output, random, MAX_OUTPUT)
            following, fresh = self._following(chain.tokens)
            goes_on = left > 1 and fresh is None
            yield chain.turn(at_ns, think_ns, answer, following if goes_on else None, *awaited)
            if fresh is not None:
                chain.begin(fresh, following)
            answered_ns = at_ns + round(answer * self._token_ns)
            if random.random() < keys.side:
                self._push(others, [self._side_request(answered_ns)])
            end_ns, awaited = answered_ns, ()
            if random.random() < preset.spawn:
                end_ns, awaited = self._spawn(answered_ns, others)
            think_ns = self._drawn_ns(TOOL_PAUSE if random.random() < TOOL_SHARE else HUMAN_PAUSE)
            at_ns = max(answered_ns + think_ns, end_ns)
        while others:
            yield heappop(others)[2]

    def _push(self, others: list[_Due], jobs: list[Job]) -> None:
        """Add the jobs of one session to the heap `others`; jobs at the same time keep
        their order.
        """
        for job in jobs:
            heappush(others, (job.at_ns, next(self._serials), job))

    def _who(self, name: str, parent: str | None = None, side: bool = False) -> Job:
        return Job(0, 1, 1, NO_IDS, session=name, group=self._name, parent=parent, side=side)

    def _first_tokens(self, size: Size) -> int:
        most = int(RESUMED_SHARE * self._keys.limit)
        return max(self._keys.tools + OWN_TOKENS, min(most, size.draw(self._random)))

    def _layers(self, tokens: int) -> tuple[Layer, ...]:
        """Return the shared layers of a prompt of `tokens`.

        The project's layer is cut so that the prompt has some tokens of its own.
        """
        keys = self._keys
        tools = (self._version, keys.tools)
        return tools, (self._project_part, min(keys.tools + keys.project, tokens - OWN_TOKENS))

    def _following(self, tokens: int) -> tuple[int, tuple[Layer, ...] | None]:
        """Return the number of tokens of the next prompt, and its shared layers if it does not
        continue this prompt.
        """
        keys, preset, random = self._keys, self._world.preset, self._random
        growth = _draw(keys.growth, random, MAX_GROWTH)
        if random.random() < preset.leap:
            growth = min(MAX_GROWTH, round(growth * preset.leap_factor))
        if random.random() < keys.reset * (1 + tokens / RESET_TOKENS):
            fresh = self._first_tokens(FRESH)
            return fresh, self._layers(fresh)
        if tokens + growth > keys.limit:
            return keys.tools + COMPACTED, ((self._version, keys.tools),)
        return tokens + growth, None

    def _drawn_ns(self, pause: tuple[float, float]) -> int:
        """Draw a pause at random and return it in ns; `pause` has the median in seconds and the
        sigma of a log-normal distribution.
        """
        median_s, sigma = pause
        drawn_s = median_s * math.exp(self._random.gauss(0.0, sigma))
        return round(min(self._keys.gap_s, drawn_s) * NS)

    def _side_request(self, at_ns: int) -> Job:
        self._sides += 1
        who = self._who(f"{self._name}/side_{self._sides}", side=True)
        keys, random = self._keys, self._random
        chain = _Chain(self._world, who, ((0, 0),), _draw(keys.side_prompt, random))
        return chain.turn(at_ns, 0, _draw(keys.side_output, random), None)

    def _spawn(self, at_ns: int, others: list[_Due]) -> tuple[int, tuple[str, ...]]:
        """Start sub-agents. Return the time until which the parent waits, and the names of the
        sub-agents that it waits for.
        """
        random, names, until_ns = self._random, [], at_ns
        children = 1
        if random.random() >= ALONE:
            children = 2
            while children < MAX_CHILDREN and random.random() < MORE:
                children += 1
        for _ in range(children):
            jobs, end_ns = self._sub_agent(at_ns)
            self._push(others, jobs)
            names.append(jobs[0].session or "")
            until_ns = max(until_ns, end_ns)
        waits = random.random() < self._keys.wait
        return (until_ns, tuple(names)) if waits else (at_ns, ())

    def _sub_agent(self, at_ns: int) -> tuple[list[Job], int]:
        """Return the turns of a new sub-agent, and the time of its last answer in ns."""
        keys, random = self._keys, self._random
        self._children += 1
        who = self._who(f"{self._name}/agent_{self._children}", parent=self._name)
        layers = ((keys.versions + self._version, keys.agent_tools),)
        chain = _Chain(self._world, who, layers, keys.agent_tools + CHILD_OWN)
        jobs: list[Job] = []
        think_ns = end_ns = 0
        for left in range(_draw(keys.agent_turns, random, MAX_TURNS), 0, -1):
            answer = _draw(keys.output, random, MAX_OUTPUT)
            following = chain.tokens + _draw(keys.agent_growth, random, MAX_GROWTH)
            fits = following <= keys.limit
            jobs.append(
                chain.turn(at_ns, think_ns, answer, following if fits and left > 1 else None)
            )
            if not fits:
                chain.begin(layers, keys.agent_tools + COMPACTED)
            end_ns = at_ns + round(answer * self._token_ns)
            think_ns = self._drawn_ns(CHILD_PAUSE)
            at_ns = end_ns + think_ns
        return jobs, end_ns


def _ranked(of: array[float], random: Random) -> int:
    return bisect(of, random.random() * of[-1])


def _draw(size: Size, random: Random, most: int = MAX_PROMPT_TOKENS) -> int:
    return max(1, min(most, size.draw(random)))
