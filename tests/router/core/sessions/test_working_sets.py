"""Tests of working sets: the sum of cached tokens by worker counts each shared prefix once, however
sessions come and go.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.core.sessions import working_sets
from router.core.sessions.working_sets import WorkingSets
from tests.router.property_support import patient

SLOTS = 4
MOVES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, SLOTS - 1), st.integers(0, 5), st.integers(1, 99)),
    max_size=80,
)


@patient
@given(MOVES, st.integers(1, 4))
def test_a_trunk_counts_once_at_each_worker_that_has_its_sessions(
    moves: list[tuple[int, int, int, int]], shown_at_most: int
) -> None:
    """A shared prefix counts once where several sessions have it; the test compares with a list of
    the sessions at each worker, with room for few arrays or many.
    """
    before, working_sets._SHOWN_TRUNKS = working_sets._SHOWN_TRUNKS, shown_at_most
    try:
        sets, here = WorkingSets(SLOTS), list[tuple[int, int]]()
        tokens: dict[int, int] = {}
        for kind, slot, trunk, count in moves:
            if kind < 6:
                sets.enter(slot, trunk, count)
                if trunk:
                    here.append((trunk, slot))
                    tokens.setdefault(trunk, count)
            elif kind < 9 and here:
                gone = here.pop(count % len(here))
                sets.leave(gone[1], gone[0])
            elif kind == 9:
                sets.clear(slot)
                here = [(t, s) for t, s in here if s != slot]
            tokens = {t: n for t, n in tokens.items() if any(t == other for other, _ in here)}
            for each_trunk in range(6):
                places = [here.count((each_trunk, s)) for s in range(SLOTS)]
                assert [sets.sessions_with(each_trunk, s) for s in range(SLOTS)] == places
                assert sets.holding(each_trunk).tolist() == [place > 0 for place in places]
                assert sets.tokens_of(each_trunk) == tokens.get(each_trunk, 0)
            distinct = set(here)
            sums = [sum(tokens[t] for t, at in distinct if at == s) for s in range(SLOTS)]
            assert sets.trunk_tokens.tolist() == sums
            assert sets.trunks == len(tokens)
    finally:
        working_sets._SHOWN_TRUNKS = before


def test_sums_change_when_sessions_are_added_or_cleared() -> None:
    sets = WorkingSets(SLOTS)
    sets.shift(2, 3.0, 30.0)
    sets.shift(2, 0.5, -5.0)
    assert (sets.private_tokens[2], sets.cold_work[2]) == (3.5, 25.0)
    sets.clear(2)
    assert (sets.private_tokens[2], sets.cold_work[2]) == (0.0, 0.0)
