"""A workload known beforehand: its requests in order of arrival, and what they share at most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from policies.contract import Hashes
from simulator.traces.job import Job

ChainOf = Callable[[Job, int], Hashes]


@dataclass(frozen=True, slots=True)
class Known:
    """Requests that some worker can run; lists have one entry each. Lifetime: process.

    `matched_tokens` is what nobody needs to compute for a request after its arrival: the longest
    prefix of full blocks that stood in the prompt of a request before it, or in an answer of any
    request. (A request behind it may well be served first and compute what both need; but then it
    is computed after this one's arrival, on this one's worker, and this one waits for it: no first
    token is earlier for it. Answers count whenever they come, so that no decoded block is ever
    taken for prefill.) A request can find `reusable_blocks` cached at most, because its last token
    is always computed; `shared_tokens` is as much of `matched_tokens`.
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
        """Of all requests."""
        return sum(job.prompt_tokens for job in self.jobs)


def know(jobs: Iterable[Job], chain_of: ChainOf, block_size: int, most_tokens: int) -> Known:
    """Read `jobs`, in order of arrival, to the end and hold them.

    `chain_of(job, row)`: hashes of full blocks of `block_size` tokens. `most_tokens`: longest
    prompt plus first token that any worker takes.
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
    """Most prompt tokens that can be found cached in all, whatever runs where and in which order.

    Somebody computes every block before anybody finds it, so of the requests whose prompt or
    answer has the block one at least does not find it. (Requests for which it holds the last
    token, and answers, compute it but never find it.) The relaxation: one cache for all, without
    limit, that whatever is computed reaches at once.
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
