"""The shape of a checkout in figures: rings of packages, imports that run upward, and more.

    python -m tests.tidy.floors [CHECKOUT ...]

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
KINDS = ("vllm", "sglang", "trtllm", "triton")
WIRING = (
    "router.assembly",
    "router.cli.serve",
    "router.request.dispatcher",
    "router.request.service",
)


@dataclass(frozen=True, slots=True)
class Import:
    """One import of one of our modules by another."""

    importer: str
    imported: str


@cache
def modules(checkout: Path, root: str) -> Mapping[str, Path]:
    """Return the files of a top-level package by the names under which they are imported."""
    found = {}
    for path in sorted((checkout / root).rglob("*.py")):
        name = ".".join(path.relative_to(checkout).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def package_of(module: str, path: Path) -> str:
    """Return the package of a module: its folder, or the module itself if it is beside packages."""
    if path.name == "__init__.py":
        return module
    parent = module.rpartition(".")[0]
    return module if "." not in parent else parent


def imports(checkout: Path, root: str) -> Iterator[Import]:
    """Yield every import within a top-level package."""
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
    """Return the packages that each package imports."""
    known = modules(checkout, root)
    graph: dict[str, set[str]] = {package_of(name, path): set() for name, path in known.items()}
    for one in imports(checkout, root):
        importer = package_of(one.importer, known[one.importer])
        imported = package_of(one.imported, known[one.imported])
        if importer != imported:
            graph[importer].add(imported)
    return graph


def ringed(graph: Mapping[str, set[str]]) -> set[str]:
    """Return the packages that import each other in a ring, over any number of other packages."""
    return {package for package in graph if package in reached(graph, package)}


def reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Return the packages that a package imports, directly or through others."""
    found: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        package = ahead.pop()
        if package not in found:
            found.add(package)
            ahead += graph[package]
    return found


def router_floors(checkout: Path) -> dict[str, int]:
    """Return the floor of each package of the router, counted from the top, as import-linter's
    contract has it. The result is empty if the checkout has no such contract.
    """
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = next((one["layers"] for one in contracts if one["name"] == FLOORS_CONTRACT), [])
    return {f"router.{name}": at for at, line in enumerate(layers) for name in line.split(" | ")}


def upward(checkout: Path) -> list[Import]:
    """Return the imports within the router that run from a floor to one above it or along the same
    floor.
    """
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


def kinds_spelt(checkout: Path) -> list[str]:
    """Return the places outside `engines` and the doctor where the router writes an engine's kind
    as text.
    """
    return [
        f"{name}:{node.lineno}"
        for name, path in modules(checkout, "router").items()
        if not name.startswith(("router.engines", "router.fleet.engines", "router.doctor"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in KINDS
    ]


def late_set(checkout: Path) -> list[str]:
    """Return the places where the modules that build the router set an attribute of
    another object.
    """
    found = []
    for name, path in modules(checkout, "router").items():
        if name not in WIRING:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else ()
            for target in targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self":
                    found.append(f"{name}:{target.lineno}")
    return found


def between_tests(checkout: Path) -> set[str]:
    """Return the imports by which a module of tests imports another module that has tests."""
    return {
        f"{one.importer} -> {one.imported}"
        for one in imports(checkout, "tests")
        if one.imported.rpartition(".")[2].startswith("test_")
    }


def product_lines(checkout: Path) -> int:
    """Return the number of lines of Python in the product."""
    folders = (*ROOTS, "kernels/kvkernels", "grafana")
    files = (path for folder in folders for path in (checkout / folder).rglob("*.py"))
    return sum(path.read_text(encoding="utf-8").count("\n") for path in files)


def figures(checkout: Path) -> dict[str, int]:
    """Return each figure by its name."""
    rings = {root: len(ringed(package_graph(checkout, root))) for root in ROOTS}
    return {
        **{f"packages in rings, {root}": count for root, count in rings.items()},
        **({"imports that run upward": len(upward(checkout))} if router_floors(checkout) else {}),
        "engines' kinds spelt outside `engines`": len(kinds_spelt(checkout)),
        "attributes set late by wiring": len(late_set(checkout)),
        "imports between modules of tests": len(between_tests(checkout)),
        "lines of Python of the product": product_lines(checkout),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="*", type=Path, default=[OWN], metavar="CHECKOUT")
    parser.add_argument("--list", action="store_true", help="list what is counted, too")
    given = parser.parse_args()
    found = [figures(checkout) for checkout in given.checkouts]
    print("|", " | ".join(["", *(checkout.name or "here" for checkout in given.checkouts)]), "|")
    print("|---" * (len(found) + 1) + "|")
    for name in found[-1]:
        print("|", " | ".join([name, *(str(one.get(name, "no floors")) for one in found)]), "|")
    if given.list:
        for checkout in given.checkouts:
            listed = [f"{one.importer} -> {one.imported}" for one in upward(checkout)]
            print(*listed, *kinds_spelt(checkout), *late_set(checkout), sep="\n")


if __name__ == "__main__":
    main()
