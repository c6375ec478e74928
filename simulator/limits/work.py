"""How much of a worker's time a request takes at least, when steps are shared with others.

The time of a step is divided among its tokens so that the parts never exceed it; a request's
parts, added up, are then work in the sense of a single-machine schedule: whatever the batches, a
worker does no more than one second of it per second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simulator.limits.floors import SLACK, answered, attention_pairs, step_s
from simulator.limits.known import Known
from simulator.limits.machines import Machine
from simulator.traces.job import Job


@dataclass(frozen=True, slots=True)
class Share:
    """One way to divide a step: seconds of it that each of its tokens bears, attention apart."""

    prefill_s: float
    decode_s: float


def shares(machine: Machine) -> tuple[Share, ...]:
    """Valid divisions; each gives a bound, and none is the best for every workload.

    Let g(T) be what a step of T tokens takes besides attention and sequences: convex and above 0
    at 0. By tokens alone, each bears the least g(T) / T there is, that of the fullest step. Or a
    tangent of g at some T0 is divided: each token bears its slope, and the rest, the fixed part
    of a step, falls on its decodes, of which there are `max_batch_size` at most; so a step
    without decodes bears less than it takes. Tangents are secants of neighbouring T here.
    """
    tokens, batch = machine.max_num_tokens, machine.max_batch_size
    even_s = _base_s(machine, tokens) / tokens
    found = [Share(even_s, even_s)]
    for place in (1, min(batch, tokens), tokens):
        slope_s = _base_s(machine, place + 1) - _base_s(machine, place)
        fixed_s = max(0.0, _base_s(machine, place) - slope_s * place)
        found.append(Share(slope_s, slope_s + fixed_s / batch))
    return tuple(found)


def prefill_works_s(machines: Sequence[Machine], known: Known) -> list[list[float]]:
    """For each way to divide steps: seconds of work at speed 1 before each first token.

    Only what `Known.matched_tokens` leaves over is charged, and to the request that came first of
    all that need it: on that request's worker it is computed after its arrival and before its
    first token, so that no part of a step is charged twice or outside of its request's time.
    Of several kinds of machines, each request is given the one that needs least for it.
    """
    return _works(machines, known, _prefill_s)


def decode_works_s(machines: Sequence[Machine], known: Known) -> list[list[float]]:
    """The same for the time between each first token and the last.

    Each token is a decode, or ends the prefill that follows a preemption, whichever is cheaper:
    such a prefill computes what stands in the last, partial block, as full ones may be cached.
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


def _base_s(machine: Machine, tokens: int) -> float:
    return step_s(machine.step_time, tokens, 0)
