"""Computes the requests per second that one worker serves, from its step times alone.

Formulas: the step-time model of `engine.step_time`; queues before prefill as M/G/1 (Pollaczek and
Khinchine) and, for several workers behind one router, its extension by Sakasegawa (1977); rates
matched as in TensorRT-LLM's tech blog 5 and in DistServe (Zhong et al., 2024). Real workers differ
in three ways: here batches are always as full as the mean, prefill chunks are cut to fit any step,
and the tokens of a step are spread evenly over all GPUs of a worker.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from engine.profiles import gpus_of, profile
from engine.step_time import CHUNK_TOKENS, StepTime
from simulator.limits.hits import make_rule
from simulator.traces.job import Job

Floats = npt.NDArray[np.float64]
CachedBy = Literal["log", "caches", "none"]  # the source of the cached tokens of prompts

RULE = "bounded"  # of `simulator.limits.hits`: caches first, and no worker far above the mean
KNOWN_SHARE = 0.5  # of the requests: fewer of which the log knows their cached tokens are too few
KV_SHARE = 0.95  # of the KV cache that running requests may fill
LINK_SHARE = 0.7  # of a link's bandwidth that transfers may take
LEGS_S = 0.005  # a second call to an engine, as in `router.core.placement.disaggregation`
HIGHEST_LOAD = 0.9  # share of its time that a worker prefills for others, at most
_STEP_TIMES = 100  # tried between the shortest possible step and the target
_LOADS = np.linspace(0.05, HIGHEST_LOAD, 18)  # of an aggregated worker's prefill, tried
_HALVINGS = 60


class MixError(ValueError):
    """Raised for a workload whose rates cannot be computed; the message says why."""


@dataclass(frozen=True, eq=False)
class Mix:
    """The requests of a workload, one entry for each. Lifetime: process. Raises MixError."""

    prompt_tokens: Floats
    uncached_tokens: Floats  # prompt tokens that the prefill worker computes; at least 1
    output_tokens: Floats
    moved_tokens: Floats | None = None  # tokens sent to the decode worker; None: all

    def __post_init__(self) -> None:
        if not len(self.prompt_tokens):
            raise MixError("there are no requests to compute capacities of")
        if np.any(self.uncached_tokens > self.prompt_tokens) or np.any(self.uncached_tokens < 1):
            raise MixError("uncached tokens of a prompt must be 1 at least and all of it at most")
        if np.any(self.output_tokens < 1):
            raise MixError("every answer must have a token at least")

    @classmethod
    def of(cls, prompt_tokens: float, uncached_tokens: float, output_tokens: float) -> Mix:
        """Return a mix of requests that are all alike."""
        return cls(*(np.array([float(n)]) for n in (prompt_tokens, uncached_tokens, output_tokens)))

    @cached_property
    def output(self) -> float:
        """Mean number of tokens of an answer."""
        return float(np.mean(self.output_tokens))

    @cached_property
    def steps(self) -> float:
        """Mean number of decode steps of an answer; the prefill makes the first token."""
        return self.output - 1.0

    @cached_property
    def uncached(self) -> float:
        """Mean number of prompt tokens that must be computed."""
        return float(np.mean(self.uncached_tokens))

    @cached_property
    def pairs(self) -> float:
        """Mean number of query-key pairs of a prefill's attention."""
        return float(np.mean(attention_pairs(self.prompt_tokens, self.uncached_tokens)))

    @cached_property
    def context(self) -> float:
        """Mean number of KV tokens that a decode step of one request reads."""
        if not self.steps:
            return float(np.mean(self.prompt_tokens))
        weights = self.output_tokens - 1.0
        contexts = self.prompt_tokens + self.output_tokens / 2.0
        return float(np.average(contexts, weights=weights))

    @cached_property
    def moved(self) -> float:
        """Mean number of prompt tokens whose KV is moved from one worker to another."""
        return float(
            np.mean(self.prompt_tokens if self.moved_tokens is None else self.moved_tokens)
        )


def attention_pairs(prompt_tokens: Floats, uncached_tokens: Floats) -> Floats:
    """Return the number of query-key pairs of attention when the last `uncached_tokens` of a prompt
    are computed.
    """
    return uncached_tokens * (prompt_tokens - uncached_tokens / 2.0)


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured mix and rate of a workload. Lifetime: process."""

    mix: Mix
    requests: int
    rate_per_s: float  # mean, over the time of all arrivals; inf: all at once
    cached_share: float  # of all prompt tokens
    cached_by: CachedBy


def measure(
    jobs: Iterable[Job],
    block_tokens: int,
    caches: int,
    kv_tokens: int,
    cached_by: CachedBy | None = None,
) -> Measured:
    """Return the mix of `jobs`, with the cached part of each prompt. "log" takes that part as the
    workers reported it, or the mean share for a prompt without a report. "caches" takes it as
    `caches` workers of `kv_tokens` each would have it with a router that looks for cached prefixes
    (`RULE`). "none": nothing is cached. The default is the log if it has reports of most requests,
    else the caches. At least one token of a prompt is always computed. Raises MixError if there are
    no requests, or for "log" if the log has no reports.
    """
    prompts, outputs, logged, found = (array("d") for _ in range(4))
    rule = make_rule(RULE, caches, max(1, kv_tokens // block_tokens))
    first_ns = last_ns = 0
    for serial, job in enumerate(jobs):
        first_ns, last_ns = (job.at_ns if not serial else first_ns), job.at_ns
        prompts.append(job.prompt_tokens)
        outputs.append(job.output_tokens)
        logged.append(-1 if job.cached_tokens is None else job.cached_tokens)
        if cached_by in (None, "caches"):
            worker, match = rule.place(serial, job.at_ns, job.ids.tolist())
            hit_tokens = min(match, job.prompt_tokens // block_tokens) * block_tokens
            rule.charge(worker, job.at_ns, job.prompt_tokens - hit_tokens)
            found.append(hit_tokens)
    if not prompts:
        raise MixError("there are no requests to compute capacities of")
    prompt = np.array(prompts)
    share, known = _logged_share(np.array(logged), prompt)
    if cached_by == "log" and not known:
        raise MixError(
            "no request of this source says how much of its prompt was cached; leave out --cached, "
            "and it is computed from the prompts' blocks"
        )
    by = cached_by or ("log" if known >= KNOWN_SHARE else "caches")
    cached = {"log": share * prompt, "caches": np.array(found), "none": np.zeros(len(prompt))}[by]
    uncached = np.maximum(prompt - cached, 1.0)
    span_s = (last_ns - first_ns) / 1e9
    return Measured(
        mix=Mix(prompt, uncached, np.array(outputs)),
        requests=len(prompt),
        rate_per_s=(len(prompt) - 1) / span_s if span_s else float("inf"),
        cached_share=1.0 - float(uncached.sum() / prompt.sum()),
        cached_by=by,
    )


def _logged_share(logged: Floats, prompt: Floats) -> tuple[Floats, float]:
    """Return the cached share of each prompt as the log has it, and the share of prompts for which
    the log has it. A prompt without a logged share gets the mean of the others.
    """
    says = logged >= 0
    shares = np.clip(logged / prompt, 0.0, 1.0)
    if not says.any():
        return shares, 0.0
    mean = logged[says].sum() / prompt[says].sum()
    return np.where(says, shares, mean), float(np.mean(says))


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of worker: one model on a number of GPUs. Lifetime: process."""

    name: str
    gpus: int
    step_time: StepTime
    kv_tokens: int
    kv_bytes_per_token: int
    ranks: int = 1  # of attention data parallelism: each fills steps of its own
    max_batch: float = math.inf

    @classmethod
    def of(cls, name: str, kv_tokens: int | None = None) -> Shape:
        """Return the worker that a profile describes. Raises ValueError for an unknown profile."""
        found = profile(name)
        return cls(
            name,
            gpus_of(name),
            found.step_time,
            kv_tokens or found.kv_capacity_tokens,
            found.kv_bytes_per_token,
            found.ranks,
        )


@dataclass(frozen=True, slots=True)
class Link:
    """The network between workers, over which KV is moved.

    Lifetime: process. Raises ValueError for invalid values. `gbps` is the rate of each GPU's own
    connection, in gigabits per second, for sending and receiving alike; a worker's KV is spread
    evenly over its GPUs. `setup_s` is added to each transfer.
    """

    gbps: float = 200.0
    setup_s: float = 0.001

    def __post_init__(self) -> None:
        if not (self.gbps > 0 and self.setup_s >= 0):
            raise ValueError(
                f"a link needs more than 0 Gbit/s and 0 s or more to set up, got {self.gbps:g} "
                f"Gbit/s and {self.setup_s:g} s"
            )

    def transfer_s(self, kv_bytes: float, gpus: int) -> float:
        """Return the seconds of a transfer that uses the connections of this many GPUs, while no
        other transfer does.
        """
        return self.setup_s + kv_bytes * 8 / (self.gbps * 1e9 * gpus)

    def rate(self, kv_bytes: float, gpus: int) -> float:
        """Return how many transfers of this size the connections of a worker with this many GPUs
        carry per second.
        """
        return LINK_SHARE * self.gbps * 1e9 * gpus / 8 / kv_bytes if kv_bytes else math.inf


@dataclass(frozen=True, slots=True)
class WaitTargets:
    """The latency limits of a request. Lifetime: process. Raises ValueError for invalid limits.
    `tpot_s` limits the mean time between tokens; with `every_step`, it limits each step.
    """

    tpot_s: float
    ttft_s: float = math.inf
    every_step: bool = False

    def __post_init__(self) -> None:
        if not (self.tpot_s > 0 and self.ttft_s > 0):
            raise ValueError(f"targets must be above 0 s: {self.tpot_s:g}, {self.ttft_s:g}")


@dataclass(frozen=True, slots=True)
class Rate:
    """The rate of requests that one worker can serve, and what limits it. Lifetime: process."""

    requests_per_s: float
    limited_by: str  # prefill, decode step, KV memory, batch, link, TTFT, or floor: not even one
    batch: float = 0.0  # requests that decode at a time
    step_s: float = 0.0  # of a step with them
    load: float = 0.0  # share of its time that it prefills
    ttft_s: float = 0.0  # mean


NONE = Rate(0.0, "floor")


def step_s(step_time: StepTime, tokens: Any, seqs: Any, pairs: Any, context: Any) -> Any:
    """Return the seconds of many steps at once: `StepTime.seconds` computed over arrays."""
    p, tokens = step_time.softmax_p, np.asarray(tokens, np.float64)
    untouched = (1.0 - step_time.expert_share) ** tokens
    read_s = step_time.weights_s + step_time.experts_s * (1.0 - untouched)
    return (
        step_time.overhead_s
        + step_time.seq_s * seqs
        + _soft_max(read_s, step_time.linear_s * tokens, p)
        + step_time.pair_s * pairs
        + step_time.context_s * context
    )


def _soft_max(left: Floats, right: Floats, p: float) -> Floats:
    high, low = np.maximum(left, right), np.minimum(left, right)
    ratio = np.divide(low, high, out=np.zeros_like(high), where=high > 0)
    return np.asarray(high * (1.0 + ratio**p) ** (1.0 / p), np.float64)


def prefill_s(step_time: StepTime, mix: Mix) -> Floats:
    """Return S(u, L): the seconds to prefill each request alone, in chunks of 8192 tokens."""
    whole, rest = np.divmod(mix.uncached_tokens, float(CHUNK_TOKENS))
    total_s = step_time.pair_s * attention_pairs(mix.prompt_tokens, mix.uncached_tokens)
    total_s = total_s + whole * step_s(step_time, CHUNK_TOKENS, 1, 0.0, 0.0)
    return np.asarray(total_s + np.where(rest > 0, step_s(step_time, rest, 1, 0.0, 0.0), 0.0))


@dataclass(frozen=True, slots=True)
class Service:
    """The mean and spread of prefill times, which determine the queue before prefill. Lifetime:
    process.
    """

    mean_s: float
    spread: float  # E[S^2] / E[S]^2: by which factor uneven prompts make the queue longer


@lru_cache(maxsize=256)
def service(step_time: StepTime, mix: Mix) -> Service:
    """Return the mean and spread of the prefill times of `mix`."""
    each_s = prefill_s(step_time, mix)
    mean_s = float(np.mean(each_s))
    return Service(mean_s, float(np.mean(each_s**2)) / mean_s**2)


def wait_s(of: Service, load: Any, workers: Any = 1) -> Any:
    """Return the mean wait of Poisson arrivals at `workers` with one queue (Sakasegawa, 1977).

    For one worker this is M/G/1: load * m2 / (2 (1 - load)), m2 = E[S^2] / E[S].
    """
    crowd = np.asarray(load, np.float64) ** (np.sqrt(2.0 * (np.asarray(workers) + 1.0)) - 1.0)
    return of.mean_s * of.spread / 2.0 * crowd / (workers * (1.0 - load))


def load_within(of: Service, most_s: float, workers: Any = 1, highest: float = HIGHEST_LOAD) -> Any:
    """Return the highest load, up to `highest`, whose mean wait is at most `most_s`; for arrays."""
    low = np.zeros(np.shape(workers))
    if most_s <= 0:
        return low
    high = np.full(np.shape(workers), highest)
    if math.isinf(most_s):
        return high
    kept = wait_s(of, high, workers) <= most_s
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        good = wait_s(of, middle, workers) <= most_s
        low, high = np.where(good, middle, low), np.where(good, high, middle)
    return np.where(kept, highest, low)


def prefill(
    shape: Shape,
    mix: Mix,
    targets: WaitTargets,
    link: Link,
    *,
    workers: int = 1,
    load: float | None = None,
    decode_step_s: float = 0.0,
) -> Rate:
    """Return R_P = load / E[S]: the rate of each of `workers` that prefill for other workers.

    Without a `load`, the load is the highest that keeps the mean TTFT, which is the sum of wait, S,
    second call, transfer, and the first step of the decode worker.
    """
    of = service(shape.step_time, mix)
    moved_bytes = mix.moved * shape.kv_bytes_per_token
    after_s = LEGS_S + link.transfer_s(moved_bytes, shape.gpus) + decode_step_s
    limit = "prefill"
    if load is None:
        load = float(load_within(of, targets.ttft_s - of.mean_s - after_s, workers))
        limit = "prefill" if load == HIGHEST_LOAD else "TTFT"
    rate = load / of.mean_s
    if (most := link.rate(moved_bytes, shape.gpus)) < rate:
        rate, load, limit = most, most * of.mean_s, "link"
    ttft_s = of.mean_s + after_s + float(wait_s(of, load, workers))
    return Rate(rate, limit, load=load, ttft_s=ttft_s)


def decode(shape: Shape, mix: Mix, targets: WaitTargets, link: Link) -> Rate:
    """Return R_D = B / ((o - 1) t(B)), the rate of a worker that only decodes, with the largest
    batch B whose step keeps the target.
    """
    if not mix.steps:
        return Rate(link.rate(mix.moved * shape.kv_bytes_per_token, shape.gpus), "link")
    by_kv = KV_SHARE * shape.kv_tokens / mix.context
    most, limit = (by_kv, "KV memory") if by_kv < shape.max_batch else (shape.max_batch, "batch")

    def seconds(batch: float) -> float:
        return float(step_s(shape.step_time, batch, batch, 0.0, batch * mix.context))

    batch = most
    if seconds(most) > targets.tpot_s:
        limit = "decode step"
        low, high = 0.0, most
        for _ in range(_HALVINGS):
            middle = (low + high) / 2.0
            low, high = (middle, high) if seconds(middle) <= targets.tpot_s else (low, middle)
        batch = low
    if batch <= 1e-6:
        return NONE
    rate = batch / (mix.steps * seconds(batch))
    if (moved := link.rate(mix.moved * shape.kv_bytes_per_token, shape.gpus)) < rate:
        return Rate(moved, "link", moved * mix.steps * seconds(batch), seconds(batch))
    return Rate(rate, limit, batch, seconds(batch))


def aggregated(shape: Shape, mix: Mix, targets: WaitTargets, *, load: float | None = None) -> Rate:
    """Return the best rate of workers that prefill in chunks while they decode.

    For `_STEP_TIMES` step times s up to the target, the largest R is found whose steps take at most
    s. A step holds B = R (o - 1) s decodes and n = R s u prefill tokens; if the target holds for
    every step, n is divided by `load`, the share of steps that have any. Without a `load`, the best
    one that keeps the mean TTFT is used.
    """
    loads = (_LOADS if load is None else np.array([load]))[None, :]
    floor_s = float(step_s(shape.step_time, 0.0, 0.0, 0.0, 0.0))
    if targets.tpot_s <= floor_s:
        return NONE
    lengths_s = np.linspace(floor_s, targets.tpot_s, _STEP_TIMES + 1)[1:, None]
    crowd = 1.0 / loads if targets.every_step else np.ones_like(loads)
    rates, full = _mixed_rates(shape, mix, lengths_s, crowd)
    of = service(shape.step_time, mix)
    # A prompt takes the share of the time that all of them take.
    each_s = np.maximum(loads / np.maximum(rates, 1e-12), of.mean_s)
    ttft_s = each_s + each_s * wait_s(Service(1.0, of.spread), loads)
    kept = np.where(ttft_s <= targets.ttft_s, rates, 0.0)
    best = np.unravel_index(int(np.argmax(kept)), kept.shape)
    rate, step = float(kept[best]), float(lengths_s[best[0], 0])
    if not rate:
        return Rate(0.0, "TTFT")
    limit = "KV memory" if full[best] else "decode step"
    load = float(loads[0, best[1]])
    return Rate(rate, limit, rate * mix.steps * step, step, load, float(ttft_s[best]))


def _mixed_rates(
    shape: Shape, mix: Mix, lengths_s: Floats, crowd: Floats
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return the largest R for each step time [:, None] and each factor of prefill tokens in a
    step, `crowd` [None, :]. Also return whether the KV memory limits R there.
    """
    pairs_per_token = mix.pairs / mix.uncached
    steps = max(mix.steps, 1e-9)

    def too_long(rates: Floats) -> npt.NDArray[np.bool_]:
        batch = rates * mix.steps * lengths_s
        tokens = rates * lengths_s * mix.uncached * crowd
        taken_s = step_s(
            shape.step_time, tokens + batch, batch, tokens * pairs_per_token, batch * mix.context
        )
        return np.asarray((taken_s > lengths_s) | (tokens + batch > CHUNK_TOKENS * shape.ranks))

    by_kv = np.minimum(KV_SHARE * shape.kv_tokens / mix.context, shape.max_batch)
    # No worker exceeds the rate that its compute allows.
    by_work = 1.0 / (shape.step_time.linear_s * mix.uncached)
    top = np.minimum(by_kv / (steps * lengths_s), by_work) * np.ones_like(crowd)
    low, high = np.zeros_like(top), top.copy()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        over = too_long(middle)
        low, high = np.where(over, low, middle), np.where(over, middle, high)
    return low, low >= top * (1 - 1e-9)
