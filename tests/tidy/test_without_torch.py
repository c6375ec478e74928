"""Router, timed worker, policies and simulator import where torch and friends are absent."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Runs in a fresh interpreter: argv[1] blocked packages, argv[2] packages to import whole.
IMPORT_ALL = """
import importlib, importlib.abc, pkgutil, sys

blocked, packages = (set(argument.split(",")) for argument in sys.argv[1:3])

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is absent here", name=name)

sys.meta_path.insert(0, Absent())
count = 0
for package in packages:
    face = importlib.import_module(package)
    for found in pkgutil.walk_packages(face.__path__, package + "."):
        if not found.name.endswith(".__main__"):
            importlib.import_module(found.name)
            count += 1
print(count)
"""

MODELS = "torch,safetensors,transformers"


def import_all(blocked: str, packages: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, blocked, packages],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("blocked", "packages"),
    [
        (f"{MODELS},matplotlib,rich", "router"),
        (f"{MODELS},matplotlib,rich", "engine"),
        (f"{MODELS},matplotlib,rich", "policies,kvkernels"),
        (MODELS, "simulator"),
    ],
)
def test_every_module_imports(blocked: str, packages: str) -> None:
    done = import_all(blocked, packages)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_the_block_works() -> None:
    """Planted: something that is imported for sure is blocked, and the run fails."""
    done = import_all("numpy", "policies")
    assert done.returncode != 0
    assert "numpy is absent here" in done.stderr
