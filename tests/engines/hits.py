"""Compares the cached tokens that a router expected, by its access log, with those that the engine
reported.
"""

from __future__ import annotations

from tests.engines.pool import Pool
from tests.live.stack import until

Hits = list[tuple[int, int]]  # (expected, cached) tokens of each request


async def hits(pool: Pool, before: int, count: int) -> Hits:
    """Return (expected, reported) cached tokens of `count` requests after the first
    `before` ones.
    """

    async def written() -> bool:
        return len(pool.logged()) >= before + count

    await until(written, "all lines of the access log")
    lines = pool.logged()[before:]
    assert all(line["status"] == 200 for line in lines)
    return [(line["expected_hit_tokens"], line["cached_tokens"]) for line in lines]


def above(seen: Hits) -> Hits:
    """Return the requests for which the router expected more cached tokens than the
    engine found.
    """
    return [one for one in seen if one[0] > one[1]]


def unequal(seen: Hits) -> Hits:
    """Return the requests for which the router expected another number of cached tokens than the
    engine found.
    """
    return [one for one in seen if one[0] != one[1]]


def counted(seen: Hits) -> str:
    """Return one line of text with how many expectations were right, too high and too low."""
    found = sum(cached > 0 for _, cached in seen)
    equal, too_many = len(seen) - len(unequal(seen)), len(above(seen))
    return f"{equal} of {len(seen)} equal, {too_many} above; {found} found something"
