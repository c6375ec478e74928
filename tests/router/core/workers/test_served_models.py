"""Tests of the counts of models that workers list, compared with a count over all workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.core.workers.served_models import ServedModels

MODELS = st.lists(st.sampled_from("abcd"), max_size=4).map(tuple)
TABLES = st.lists(st.dictionaries(st.integers(0, 3), MODELS), max_size=6)


@given(TABLES)
def test_models_are_served_while_a_worker_lists_them(tables) -> None:
    served = ServedModels()
    for table in tables:
        served.look(table.items())
        served.look(table.items())  # once more changes nothing
        found = {model for model in "abcd" if model in served}
        assert found == {model for models in table.values() for model in models}
