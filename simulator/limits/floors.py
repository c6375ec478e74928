"""What one request takes at least, on the fastest worker and with nobody else there."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor

from engine.step_time import StepTime
from simulator.limits.machines import Machine

SLACK = 1.0 - 1e-12  # floating-point sums of times are good to less than this


@dataclass(frozen=True, slots=True)
class _Load:
    prefill_tokens: int
    prefill_seqs: int = 1
    decode_seqs: int = 0
    decode_ctx_tokens: int = 0
    attention_pairs: float = 0.0


def step_s(step_time: StepTime, tokens: int, seqs: int = 1) -> float:
    """Seconds of a step of so many new tokens in `seqs` sequences, its attention left out."""
    return step_time.seconds(_Load(tokens, seqs))


def first_token_ns(machine: Machine, prompt_tokens: int, shared_tokens: int) -> int:
    """Least ns from a request's arrival at an idle worker to its first token.

    All but `shared_tokens` of the prompt is computed on its worker after its arrival, whoever
    asked for it (see `Known`), in steps of `max_num_tokens` at most. A step's time is convex in
    its tokens and above 0 for none, so the fewest, equal steps are the fastest; attention comes
    to the same however the tokens are cut.
    """
    step_time = machine.step_time
    tokens = prompt_tokens - shared_tokens
    steps = -(-tokens // machine.max_num_tokens)
    total_s = steps * step_s(step_time, tokens // steps) + step_time.pair_s * attention_pairs(
        shared_tokens, prompt_tokens
    )
    return _least_ns(total_s / machine.speed, steps)


def further_tokens_ns(machine: Machine, prompt_tokens: int, output_tokens: int) -> int:
    """Least ns from the first token to the last: a step each, that reads the KV so far.

    A token that ends a preemption is given by a prefill, whose attention is cheaper. But the step
    that preempted gave it nothing and took at least an empty step's time, so a token's attention
    is charged up to that only.
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
    """Query-key pairs of prefilling the tokens `start` to `stop`, as `StepTime` counts them."""
    return (stop * stop - start * start) / 2


def answered(machine: Machine, prompt_tokens: int, output_tokens: int) -> int:
    """Tokens that the worker gives: an answer ends where the longest sequence does."""
    return min(output_tokens, machine.sequence_tokens - prompt_tokens)


def _least_ns(total_s: float, steps: int) -> int:
    # Each step is rounded to whole ns, and takes one at least.
    return max(steps, ceil(total_s * SLACK * 1e9 - steps / 2) - 1)
