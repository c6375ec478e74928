"""Makes `kvkernels.ops` importable from a checkout on a machine with only Python, torch and numpy.

The package's `__init__` needs its native build, msgspec and xxhash, which the operators do not use.
If it cannot be imported, an empty package with the same name and folder takes its place.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]
NEEDED = ("torch", "numpy")


def missing() -> list[str]:
    """Return the names of the required packages that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def make_importable() -> None:
    """Make the project's modules importable; call this before any import of `kvkernels`
    or `tests`.
    """
    for folder in (ROOT / "kernels", ROOT):
        sys.path.insert(0, str(folder))
    try:
        importlib.import_module("kvkernels")
    except ImportError:
        package = ModuleType("kvkernels")
        package.__path__ = [str(ROOT / "kernels" / "kvkernels")]
        sys.modules["kvkernels"] = package


def pytest_configure() -> None:
    """Make the project's modules importable before any test is imported; pytest calls this hook
    (`-p tests.bench.gpu.bare`).
    """
    make_importable()
