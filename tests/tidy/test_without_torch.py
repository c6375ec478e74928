"""Tests that router, simulated worker, policies and simulator can be imported without torch and
similar libraries.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Runs in a fresh interpreter: argv[1] has the blocked packages, argv[2] the packages to import
# whole, and argv[3] the modules that may import blocked packages.
IMPORT_ALL = """
import importlib, importlib.abc, pkgutil, sys

blocked, packages = (set(argument.split(",")) for argument in sys.argv[1:3])
excused = tuple(sys.argv[3].split(","))

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is absent here", name=name)

sys.meta_path.insert(0, Absent())
count = 0
for package in packages:
    face = importlib.import_module(package)
    for found in pkgutil.walk_packages(getattr(face, "__path__", ()), package + "."):
        if not found.name.endswith(".__main__"):
            try:
                importlib.import_module(found.name)
                count += 1
            except ModuleNotFoundError as error:
                is_blocked = error.name.partition(".")[0] in blocked
                if not is_blocked or not found.name.startswith(excused):
                    raise
print(count)
"""

MODELS = "torch,safetensors,transformers"
# Modules that compute; all others must do without torch.
COMPUTING = "engine.model.,engine.runner.,engine.sampling.torch_,kvkernels.ops."


def import_all(blocked: str, packages: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, blocked, packages, COMPUTING],
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
def test_every_module_imports_without_the_blocked_libraries(blocked: str, packages: str) -> None:
    done = import_all(blocked, packages)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_model_descriptions_import_without_torch() -> None:
    modules = "config,kernel_choice,tiny"
    done = import_all(MODELS, ",".join(f"engine.model.{name}" for name in modules.split(",")))
    assert done.returncode == 0, done.stderr


def test_importing_a_blocked_library_fails() -> None:
    """Blocking a module works: if a module that is certainly imported is blocked, the run fails."""
    done = import_all("numpy", "policies")
    assert done.returncode != 0
    assert "numpy is absent here" in done.stderr
