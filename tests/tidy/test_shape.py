"""Tests of the shape of the product's modules: no ring of imports, and one idea in each module."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest

from tests.tidy import rules
from tests.tidy.checkout import parsed, python

FOLDERS = ("router/", "engine/", "policies/", "simulator/", "kernels/", "grafana/")


def test_no_modules_import_each_other_in_a_ring() -> None:
    ring = rules.import_cycle({path: parsed(path) for path in python() if path.startswith(FOLDERS)})
    assert not ring, " -> ".join(ring)


GROUPS_MAX = 2
PANELS = "grafana/panels_"  # lists of panels, which name nothing but a page's place


def test_no_module_has_several_unrelated_groups_of_definitions() -> None:
    found = {
        path: groups
        for path in python()
        if path.startswith(FOLDERS) and not path.startswith(PANELS)
        if len(groups := rules.unrelated_groups(parsed(path))) > GROUPS_MAX
    }
    assert not found, found


def test_unrelated_groups_of_definitions_are_found() -> None:
    rows = "\n".join(f"    {number}" for number in range(25))
    texts = [f"def {name}():\n{rows}\n" for name in "abc"]
    assert rules.unrelated_groups(ast.parse("".join(texts))) == [["a"], ["b"], ["c"]]
    tied = "".join(texts) + "d: 'a' = b\n"
    assert sorted(map(sorted, rules.unrelated_groups(ast.parse(tied)))) == [["a", "b", "d"], ["c"]]
    assert rules.unrelated_groups(ast.parse("def a():\n    1\n")) == []


@pytest.mark.parametrize("program", ["router", "engine", "simulator"])
def test_no_class_name_is_defined_twice_within_one_program(program: str) -> None:
    places = defaultdict(list)
    for path in python():
        if path.startswith(f"{program}/"):
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(path)
    twice = {name: paths for name, paths in places.items() if len(set(paths)) > 1}
    assert not twice, twice
