"""The visible blocks of a cache as runs, in an order that its history has no part in."""

from __future__ import annotations

from collections.abc import Iterable

from engine.block_pool import Stored


def runs_of(contents: Iterable[Stored]) -> list[tuple[int | None, list[int]]]:
    """(parent chain hash, chain hashes after it), parents before children.

    Where the tree forks a run follows the smallest hash; the others start runs of their own.
    """
    children: dict[int | None, list[int]] = {}
    for stored in contents:
        parent = stored.parent_hash
        for block_hash in stored.block_hashes:
            children.setdefault(parent, []).append(block_hash)
            parent = block_hash
    runs: list[tuple[int | None, list[int]]] = []
    starts: list[tuple[int | None, int]] = []  # the next one last
    starts += [(None, one) for one in sorted(children.get(None, ()), reverse=True)]
    while starts:
        parent, first = starts.pop()
        run = [first]
        while following := sorted(children.get(run[-1], ())):
            starts += [(run[-1], one) for one in reversed(following[1:])]
            run.append(following[0])
        runs.append((parent, run))
    return runs
