"""The shape of the product's modules: none of them import each other in a ring."""

from __future__ import annotations

from tests.tidy import rules
from tests.tidy.test_tidy import parsed, python

FOLDERS = ("router/", "engine/", "policies/", "simulator/", "kernels/", "grafana/")


def test_no_modules_import_each_other_in_a_ring() -> None:
    ring = rules.import_cycle({path: parsed(path) for path in python() if path.startswith(FOLDERS)})
    assert not ring, " -> ".join(ring)
