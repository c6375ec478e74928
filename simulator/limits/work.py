"""Computes the least time that each request of a known workload takes on a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor

from engine.profiles import profile
from engine.scheduler.types import SchedulerSettings
from engine.step_time import StepTime
from policies.contract import Hashes
from simulator.replay.setup import WorkerGroup
from simulator.traces.job import Job

DEFAULTS = SchedulerSettings()


@dataclass(frozen=True, slots=True)
class Machine:
    """A group of equal workers. Lifetime: process."""

    count: int
    step_time: StepTime
    speed: float  # every step takes its time divided by this
    blocks: int
    block_size: int
    max_num_tokens: int  # computed in one step
    max_batch_size: int  # sequences in one step
    sequence_tokens: int  # longest prompt plus answer
    prefix_wait_tokens: int  # least prefix in flight that a request waits for; 0: never

    def takes(self, prompt_tokens: int) -> bool:
        """Return whether these workers can ever compute the first token of a prompt of
        this length.
        """
        return prompt_tokens + 1 <= self.sequence_tokens


def machine(group: WorkerGroup, block_size: int) -> Machine:
    """Return the workers of `group` with blocks of `block_size` tokens. Raises ValueError for an
    unknown profile.
    """
    model = profile(group.profile)
    blocks = max(1, (group.kv_tokens or model.kv_capacity_tokens) // block_size)
    model_tokens = group.max_model_tokens or DEFAULTS.max_model_tokens
    batch_size = group.max_batch_size or DEFAULTS.max_batch_size
    return Machine(
        count=group.count,
        step_time=model.step_time,
        speed=group.speed,
        blocks=blocks,
        block_size=block_size,
        max_num_tokens=group.max_num_tokens or max(DEFAULTS.max_num_tokens, batch_size),
        max_batch_size=batch_size,
        sequence_tokens=min(model_tokens, blocks * block_size),
        prefix_wait_tokens=(
            DEFAULTS.prefix_wait_tokens
            if group.prefix_wait_tokens is None
            else group.prefix_wait_tokens
        ),
    )


ChainOf = Callable[[Job, int], Hashes]


@dataclass(frozen=True, slots=True)
class Known:
    """The requests that some worker can run; lists have one entry for each.

    Lifetime: process. `matched_tokens` are the tokens that no worker needs to compute for a request
    after its arrival: the longest prefix of full blocks that was in the prompt of an earlier
    request, or in an answer of any request. (A later request may be served first and compute what
    both need. But then it is computed after this one's arrival, on this one's worker, and this one
    waits for it: no first token is earlier for it. Answers count whenever they come, so that no
    decoded block is ever taken for prefill.) A request can find at most `reusable_blocks` cached,
    because its last token is always computed; `shared_tokens` is the part of `matched_tokens` that
    lies in these blocks.
    """

    jobs: tuple[Job, ...]
    rows: tuple[int, ...]  # place in the workload, from 0
    chains: tuple[Hashes, ...]  # full blocks of the prompt, then known ones of the answer
    matched_tokens: tuple[int, ...]
    shared_tokens: tuple[int, ...]
    reusable_blocks: tuple[int, ...]
    block_size: int
    hopeless: int  # requests that no worker can run; they are left out

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens of all requests."""
        return sum(job.prompt_tokens for job in self.jobs)


def know(jobs: Iterable[Job], chain_of: ChainOf, block_size: int, most_tokens: int) -> Known:
    """Read all `jobs`, which are in order of arrival, and keep what the bounds need of them.

    `chain_of(job, row)` returns the hashes of full blocks of `block_size` tokens. `most_tokens` is
    the longest prompt plus first token that any worker takes.
    """
    kept: list[Job] = []
    rows: list[int] = []
    chains: list[Hashes] = []
    hopeless = 0
    for row, job in enumerate(jobs):
        if job.prompt_tokens + 1 > most_tokens:
            hopeless += 1
            continue
        kept.append(job)
        rows.append(row)
        chains.append(chain_of(job, row))
    matched = tuple(_matched(kept, chains, block_size))
    reusable = tuple((job.prompt_tokens - 1) // block_size for job in kept)
    return Known(
        jobs=tuple(kept),
        rows=tuple(rows),
        chains=tuple(chains),
        matched_tokens=matched,
        shared_tokens=tuple(
            min(tokens, blocks * block_size)
            for tokens, blocks in zip(matched, reusable, strict=True)
        ),
        reusable_blocks=reusable,
        block_size=block_size,
        hopeless=hopeless,
    )


def reuse_ceiling_tokens(known: Known) -> int:
    """Return the most prompt tokens that can be found cached in all, wherever and in whatever order
    requests run.

    Every block is computed before it is found, so of the requests whose prompt or answer has the
    block, at least one does not find it. (Requests in which it holds the last token, and answers,
    compute it but never find it.) The relaxation is one unlimited cache for all workers, which
    computed blocks reach at once.
    """
    finders: dict[int, int] = {}
    others: set[int] = set()
    for chain, reusable in zip(known.chains, known.reusable_blocks, strict=True):
        ids = chain.tolist()
        for block in ids[:reusable]:
            finders[block] = finders.get(block, 0) + 1
        others.update(ids[reusable:])
    return known.block_size * sum(count - (block not in others) for block, count in finders.items())


def _matched(jobs: Sequence[Job], chains: Sequence[Hashes], block_size: int) -> Iterable[int]:
    seen: set[int] = set()
    for job, chain in zip(jobs, chains, strict=True):
        seen.update(chain[job.prompt_tokens // block_size :].tolist())
    for job, chain in zip(jobs, chains, strict=True):
        full = job.prompt_tokens // block_size
        prompt: list[int] = chain[:full].tolist()
        match = next((depth for depth, block in enumerate(prompt) if block not in seen), full)
        seen.update(prompt[match:])
        yield match * block_size


SLACK = 1.0 - 1e-12  # floating-point sums of times are good to less than this


@dataclass(frozen=True, slots=True)
class _Load:
    prefill_tokens: int
    prefill_seqs: int = 1
    decode_seqs: int = 0
    decode_ctx_tokens: int = 0
    attention_pairs: float = 0.0


def step_s(step_time: StepTime, tokens: int, seqs: int = 1) -> float:
    """Return the seconds of a step that computes this many new tokens in `seqs` sequences, without
    attention.
    """
    return step_time.seconds(_Load(tokens, seqs))


def first_token_ns(machine: Machine, prompt_tokens: int, shared_tokens: int) -> int:
    """Return the least ns from a request's arrival at an idle worker to its first token.

    All but `shared_tokens` of the prompt are computed on its worker after its arrival, by any
    request (see `Known`), in steps of at most `max_num_tokens`. Two bounds hold, and the larger is
    taken. A convex step time below the true one is above 0 for no tokens, so by it the fewest,
    equal steps are the fastest. And a token's share of a step falls with the step's tokens, so no
    token takes less than in the fullest step. Attention is the same however the tokens are divided.
    """
    step_time = machine.step_time
    tokens = prompt_tokens - shared_tokens
    steps = -(-tokens // machine.max_num_tokens)
    fullest = min(tokens, machine.max_num_tokens)
    compute_s = max(
        steps * step_s(step_time.convex, tokens // steps),
        tokens * step_s(step_time, fullest) / fullest,
    )
    total_s = compute_s + step_time.pair_s * attention_pairs(shared_tokens, prompt_tokens)
    return _least_ns(total_s / machine.speed, steps)


def further_tokens_ns(machine: Machine, prompt_tokens: int, output_tokens: int) -> int:
    """Return the least ns from the first token to the last: one step for each, which reads the KV
    so far.

    A token that ends a preemption comes from a prefill, whose attention is cheaper. But the step
    that preempted gave the request nothing and took at least an empty step's time, so a token's
    attention is charged only up to that.
    """
    step_time = machine.step_time
    steps = answered(machine, prompt_tokens, output_tokens) - 1
    base_s = step_s(step_time, 1)
    read_s = step_time.context_s
    full = steps  # tokens whose attention is charged in full, the first ones
    if read_s * (prompt_tokens + steps) > base_s:
        full = min(steps, max(0, floor(base_s / read_s) - prompt_tokens))
    contexts = full * prompt_tokens + full * (full + 1) // 2
    total_s = steps * base_s + read_s * contexts + (steps - full) * base_s
    return _least_ns(total_s / machine.speed, steps)


def attention_pairs(start: int, stop: int) -> float:
    """Return the query-key pairs of prefilling the tokens `start` to `stop`, as `StepTime` counts
    them.
    """
    return (stop * stop - start * start) / 2


def answered(machine: Machine, prompt_tokens: int, output_tokens: int) -> int:
    """Return the tokens that the worker produces: an answer ends at the longest
    sequence's limit.
    """
    return min(output_tokens, machine.sequence_tokens - prompt_tokens)


def _least_ns(total_s: float, steps: int) -> int:
    # Each step is rounded to whole ns, and takes one at least.
    return max(steps, ceil(total_s * SLACK * 1e9 - steps / 2) - 1)


@dataclass(frozen=True, slots=True)
class Share:
    """One way to divide the time of a step: the seconds of it that each of its tokens is charged,
    without attention.
    """

    prefill_s: float
    decode_s: float


def shares(machine: Machine) -> tuple[Share, ...]:
    """Return valid ways to divide the time of a step; each gives a bound, and none is the best for
    every workload.

    Let g(T) be the time of a step of T tokens besides attention and sequences. In the first way,
    each token is charged the least g(T) / T there is, that of the fullest step. The other ways take
    a tangent at some T0 of a convex function below g: each token is charged its slope, and the
    rest, the fixed part of a step, is charged to its decodes, of which there are at most
    `max_batch_size`; so a step without decodes is charged less than it takes. Tangents are secants
    of neighbouring T here.
    """
    tokens, batch = machine.max_num_tokens, machine.max_batch_size
    even_s = step_s(machine.step_time, tokens, 0) / tokens
    found = [Share(even_s, even_s)]
    below = machine.step_time.convex
    for place in (1, min(batch, tokens), tokens):
        here_s = step_s(below, place, 0)
        slope_s = step_s(below, place + 1, 0) - here_s
        fixed_s = max(0.0, here_s - slope_s * place)
        found.append(Share(slope_s, slope_s + fixed_s / batch))
    return tuple(found)


def prefill_works_s(machines: Sequence[Machine], known: Known) -> list[list[float]]:
    """For each way to divide steps, return the seconds of work at speed 1 before each first token.

    Only tokens beyond `Known.matched_tokens` are charged, to the earliest of all requests that need
    them: on that request's worker they are computed after its arrival and before its first token,
    so no part of a step is charged twice or outside of its request's time. Of several kinds of
    machines, each request is given the one that needs least for it.
    """
    return _works(machines, known, _prefill_s)


def decode_works_s(machines: Sequence[Machine], known: Known) -> list[list[float]]:
    """Return, for each way to divide steps, the seconds of work at speed 1 between each request's
    first token and its last.

    Each token is a decode, or ends the prefill that follows a preemption, whichever is cheaper:
    such a prefill computes the last, partial block, as full blocks may be cached.
    """
    return _works(machines, known, _decode_s)


def _works(
    machines: Sequence[Machine],
    known: Known,
    work_s: Callable[[Machine, Share, Job, int], float],
) -> list[list[float]]:
    divided = [(machine, shares(machine)) for machine in machines]
    return [
        [
            SLACK
            * min(
                work_s(machine, ways[number], job, matched)
                for machine, ways in divided
                if machine.takes(job.prompt_tokens)
            )
            for job, matched in zip(known.jobs, known.matched_tokens, strict=True)
        ]
        for number in range(len(divided[0][1]))
    ]


def _prefill_s(machine: Machine, share: Share, job: Job, matched_tokens: int) -> float:
    tokens = job.prompt_tokens - matched_tokens
    pairs = attention_pairs(matched_tokens, job.prompt_tokens)
    return share.prefill_s * tokens + machine.step_time.pair_s * pairs


def _decode_s(machine: Machine, share: Share, job: Job, _matched_tokens: int) -> float:
    step_time, size = machine.step_time, machine.block_size
    tokens = answered(machine, job.prompt_tokens, job.output_tokens) - 1
    token_s = share.decode_s + step_time.seq_s
    first, last = job.prompt_tokens + 1, job.prompt_tokens + tokens  # tokens read
    total_s = tokens * token_s + step_time.context_s * ((first + last) * tokens // 2)
    dearest_s = token_s + step_time.context_s * last
    most = size if share.prefill_s * size <= dearest_s else int(dearest_s / share.prefill_s)
    for partial in range(1, most + 1):
        for context in range(first + (partial - first) % size, last + 1, size):
            decode_s = token_s + step_time.context_s * context
            total_s -= max(0.0, decode_s - _resume_s(machine, share, context, partial))
    return total_s


def _resume_s(machine: Machine, share: Share, context: int, tokens: int) -> float:
    pairs = attention_pairs(context - tokens, context)
    return share.prefill_s * tokens + machine.step_time.pair_s * pairs
