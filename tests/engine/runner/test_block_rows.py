"""Tests of the array that has each request's block ids as a row: it always equals the request's
list.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.runner.work import LEAST_BLOCKS, BlockRows
from engine.scheduler.request import Request

EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["grow", "grow", "publish", "again", "next"])),
    max_size=60,
)


def new(number: int) -> Request:
    return Request(number, np.zeros(1, dtype=np.int32), 1)


@given(EVENTS, st.integers(1, LEAST_BLOCKS))
def test_a_row_equals_its_requests_list_of_blocks(events: list[tuple[int, str]], most: int) -> None:
    """A row equals its request's list of blocks, although lists grow, equal blocks are replaced on
    publishing, all blocks are taken and given back, and requests come and go.
    """
    requests, rows, fresh = [new(row) for row in range(3)], BlockRows(3), iter(range(1, 1 << 20))
    for row, event in events:
        one = requests[row]
        if event == "grow":
            one.block_ids += [next(fresh) for _ in range(most)]
        elif event == "publish":
            start, stop = one.visible_blocks, len(one.block_ids)
            one.block_ids[start:stop] = [next(fresh) for _ in range(start, stop)]
            one.visible_blocks = stop
        elif event == "again":
            one.block_ids = [next(fresh) for _ in range(len(one.block_ids))]
            one.visible_blocks = len(one.block_ids) // 2
        else:
            requests[row] = one = new(9 + row)
        assert rows.of(one, row).tolist() == one.block_ids
    for row, one in enumerate(requests):
        assert rows.of(one, row).tolist() == one.block_ids
