"""How the packages of the product import each other: rings, and imports that run upward.

    python -m tests.tidy.floors [CHECKOUT]

Every import counts, those for type checkers and those inside functions as well. A package is a
folder; a module beside packages, as `router/assembly.py`, counts as a package of its own.
"""

from __future__ import annotations

import argparse
import ast
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOTS = ("router", "engine", "simulator", "policies")
OWN = Path(__file__).parents[2]
FLOORS_CONTRACT = "Floors of the router"


@dataclass(frozen=True, slots=True)
class Import:
    """One import of a module of ours by another."""

    importer: str
    imported: str


@cache
def modules(checkout: Path, root: str) -> Mapping[str, Path]:
    """The files of a top-level package, by the names under which they are imported."""
    found = {}
    for path in sorted((checkout / root).rglob("*.py")):
        name = ".".join(path.relative_to(checkout).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def package_of(module: str, path: Path) -> str:
    """The folder of a module, or the module itself where it is beside packages."""
    if path.name == "__init__.py":
        return module
    parent = module.rpartition(".")[0]
    return module if parent in ROOTS else parent


def imports(checkout: Path, root: str) -> Iterator[Import]:
    """Every import within a top-level package."""
    known = modules(checkout, root)
    for importer, path in known.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                found = name if name in known else name.rpartition(".")[0]
                if found in known and found != importer:
                    yield Import(importer, found)


def package_graph(checkout: Path, root: str) -> dict[str, set[str]]:
    """Which packages each package imports."""
    known = modules(checkout, root)
    graph: dict[str, set[str]] = {package_of(name, path): set() for name, path in known.items()}
    for one in imports(checkout, root):
        importer = package_of(one.importer, known[one.importer])
        imported = package_of(one.imported, known[one.imported])
        if importer != imported:
            graph[importer].add(imported)
    return graph


def ringed(graph: Mapping[str, set[str]]) -> set[str]:
    """The packages that import each other in a ring, over however many others."""
    return {package for package in graph if package in reached(graph, package)}


def reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """What a package imports, and what that imports."""
    found: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        package = ahead.pop()
        if package not in found:
            found.add(package)
            ahead += graph[package]
    return found


def router_floors(checkout: Path) -> dict[str, int]:
    """The floor of each package of a checkout's router, counted from the top, as its contract of
    import-linter has it; empty where it has none.
    """
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = next((one["layers"] for one in contracts if one["name"] == FLOORS_CONTRACT), [])
    return {f"router.{name}": at for at, line in enumerate(layers) for name in line.split(" | ")}


def upward(checkout: Path) -> list[Import]:
    """Imports within the router that run from a floor to one above it, or along the same one."""
    floors = router_floors(checkout)
    found = set()
    for one in imports(checkout, "router"):
        importer, imported = (
            ".".join(module.split(".")[:2]) for module in (one.importer, one.imported)
        )
        within = importer == imported or "router" in (importer, imported)
        if not within and floors[importer] >= floors[imported]:
            found.add(one)
    return sorted(found, key=lambda one: (one.importer, one.imported))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", nargs="?", type=Path, default=OWN)
    parser.add_argument("--list", action="store_true", help="list the imports that run upward")
    given = parser.parse_args()
    for root in ROOTS:
        rings = ringed(package_graph(given.checkout, root))
        print(f"packages in rings, {root}: {len(rings)}")
    if not router_floors(given.checkout):
        print(f"imports that run upward: its pyproject.toml has no contract {FLOORS_CONTRACT!r}")
        return
    found = upward(given.checkout)
    print(f"imports that run upward, router: {len(found)}")
    for one in found if given.list else ():
        print(f"  {one.importer} -> {one.imported}")


if __name__ == "__main__":
    main()
