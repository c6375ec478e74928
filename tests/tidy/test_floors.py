"""Tests that no packages, nested ones included, import each other in a ring; import-linter checks
the floors.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tidy.floors import OWN, ROOTS, imports, modules, package_graph, ringed


@pytest.mark.parametrize("root", ROOTS)
def test_no_packages_import_each_other_in_a_ring(root: str) -> None:
    assert sorted(ringed(package_graph(OWN, root))) == []


def test_import_rings_are_detected(tmp_path: Path) -> None:
    package = tmp_path / "router"
    for name, text in {
        "__init__": "",
        "a/__init__": "",
        "a/one": "if TYPE_CHECKING:\n    from router.b.two import X",
        "b/__init__": "",
        "b/two": "def late():\n    import router.c.three",
        "c/__init__": "",
        "c/three": "from router.a import one",
        "d": "from router.a.one import X\nfrom router.c import three",
    }.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    graph = package_graph(tmp_path, "router")
    assert ringed(graph) == {"router.a", "router.b", "router.c"}
    assert graph["router.d"] == {"router.a", "router.c"}
    assert len(list(imports(tmp_path, "router"))) == 5


@pytest.mark.parametrize("root", ROOTS)
def test_no_modules_import_each_other_in_a_ring(root: str) -> None:
    """No modules import each other in a ring, including imports for type checkers and inside
    functions.
    """
    graph: dict[str, set[str]] = {name: set() for name in modules(OWN, root)}
    for one in imports(OWN, root):
        graph[one.importer].add(one.imported)
    assert sorted(ringed(graph)) == []
