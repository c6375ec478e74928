"""Makes `kvkernels.ops` importable from a checkout on a machine with Python, torch and numpy alone.

The package's face wants its native build, msgspec and xxhash, which the operators do not use. Where
the face cannot be imported, a bare package of the same name and folder takes its place.
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
    """Which of the packages that nothing here goes without are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def make_importable() -> None:
    """Call before anything of `kvkernels` or `tests` is imported."""
    for folder in (ROOT / "kernels", ROOT):
        sys.path.insert(0, str(folder))
    try:
        importlib.import_module("kvkernels")
    except ImportError:
        package = ModuleType("kvkernels")
        package.__path__ = [str(ROOT / "kernels" / "kvkernels")]
        sys.modules["kvkernels"] = package


def pytest_configure() -> None:
    """As a plug-in (`-p tests.bench.gpu.bare`): before any test is imported."""
    make_importable()
