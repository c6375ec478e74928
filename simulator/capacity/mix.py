"""The requests of a workload as capacities depend on them: tokens to compute, read, and move."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from simulator.limits.hits import make_rule
from simulator.traces.job import Job

Floats = npt.NDArray[np.float64]
CachedBy = Literal["log", "caches", "none"]  # who says what of a prompt was cached

RULE = "bounded"  # of `simulator.limits.hits`: caches first, and no worker far above the mean
KNOWN_SHARE = 0.5  # of the requests: fewer of which the log knows their cached tokens are too few


class MixError(ValueError):
    """Requests that nothing can be computed of. The text says why."""


@dataclass(frozen=True, eq=False)
class Mix:
    """The requests of a workload, one entry each. Lifetime: process. Raises MixError."""

    prompt_tokens: Floats
    uncached_tokens: Floats  # of the prompt, computed by whoever prefills it; at least 1
    output_tokens: Floats
    moved_tokens: Floats | None = None  # sent to whoever decodes it; None: all of the prompt

    def __post_init__(self) -> None:
        if not len(self.prompt_tokens):
            raise MixError("there are no requests to compute capacities of")
        if np.any(self.uncached_tokens > self.prompt_tokens) or np.any(self.uncached_tokens < 1):
            raise MixError("uncached tokens of a prompt must be 1 at least and all of it at most")
        if np.any(self.output_tokens < 1):
            raise MixError("every answer must have a token at least")

    @classmethod
    def of(cls, prompt_tokens: float, uncached_tokens: float, output_tokens: float) -> Mix:
        """Requests that are all alike."""
        return cls(*(np.array([float(n)]) for n in (prompt_tokens, uncached_tokens, output_tokens)))

    @cached_property
    def output(self) -> float:
        """Mean tokens of an answer."""
        return float(np.mean(self.output_tokens))

    @cached_property
    def steps(self) -> float:
        """Mean decode steps of an answer; its first token is the prefill's."""
        return self.output - 1.0

    @cached_property
    def uncached(self) -> float:
        """Mean prompt tokens to compute."""
        return float(np.mean(self.uncached_tokens))

    @cached_property
    def pairs(self) -> float:
        """Mean query-key pairs of a prefill's attention."""
        return float(np.mean(attention_pairs(self.prompt_tokens, self.uncached_tokens)))

    @cached_property
    def context(self) -> float:
        """Mean KV tokens that a decode step of one request reads."""
        if not self.steps:
            return float(np.mean(self.prompt_tokens))
        weights = self.output_tokens - 1.0
        contexts = self.prompt_tokens + self.output_tokens / 2.0
        return float(np.average(contexts, weights=weights))

    @cached_property
    def moved(self) -> float:
        """Mean prompt tokens whose KV goes from one worker to another."""
        return float(
            np.mean(self.prompt_tokens if self.moved_tokens is None else self.moved_tokens)
        )


def attention_pairs(prompt_tokens: Floats, uncached_tokens: Floats) -> Floats:
    """Query-key pairs, where the last `uncached_tokens` of a prompt are computed."""
    return uncached_tokens * (prompt_tokens - uncached_tokens / 2.0)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a workload is. Lifetime: process."""

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
    """The mix of `jobs`, with what of each prompt was cached.

    "log": as the workers reported it, the mean share where one did not. "caches": as `caches`
    workers of `kv_tokens` each would have found it, had a router looked for it (`RULE`). "none":
    nothing. By default the log where it knows of most requests, else the caches. At least one
    token of a prompt is always computed. Raises MixError for no requests, or a log that knows
    nothing where it shall tell.
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
    """Each prompt's cached share by the log, the mean of the known where it does not say; and of
    how many it says."""
    says = logged >= 0
    shares = np.clip(logged / prompt, 0.0, 1.0)
    if not says.any():
        return shares, 0.0
    mean = logged[says].sum() / prompt[says].sum()
    return np.where(says, shares, mean), float(np.mean(says))
