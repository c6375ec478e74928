"""Decides by a test's path which `make` target runs it: quick (`make test`), live, native or
engines.

Nobody has to mark a test: a file that no pattern here matches is quick. A test that is unlike its
file has a mark with the tier's name.
"""

from __future__ import annotations

import re
import shutil
from fnmatch import fnmatch

# Needs more than the ordinary build: sanitizers, fuzzers, the CUDA emulator, nvcc. Or repeats other
# tests in the way of other processors.
NATIVE = (
    "kernels/cuda/test_*.py",
    "kernels/fuzz/test_*.py",
    "kernels/test_sanitized.py",
    "simulator/test_every_processor.py",
    "engine/model/test_kernel_emulated.py",
    "engine/model/test_kernel_trial.py",
)
# Starts programs to harm, replace or measure them, or needs a server, a browser, a client library.
LIVE = (
    "live/*.py",
    "grafana/test_*.py",
    "forks/*.py",
    "deploy/test_chart.py",
    "deploy/test_engine_scaling.py",
    "deploy/test_kubernetes.py",
    "deploy/test_kubernetes_page.py",
    "release/test_commands.py",
    "release/test_first_hour.py",
    "release/test_image.py",
    "release/test_wheels.py",
    "engine/test_instances_live.py",
    "engine/server/test_triton.py",
    "simulator/cli/test_ends.py",
    "simulator/cli/test_profiles_against_aic.py",
    "simulator/live/test_demo.py",
    "simulator/live/test_page_in_browser.py",
    "simulator/live/test_stack.py",
    "simulator/runs/test_sweep_dask.py",
)
# Needs real engines, in environments of their own (tests/engines/environment.py).
ENGINES = ("engines/test_*.py",)
NOT_ENGINES = ("engines/test_compatibility.py",)
# These share one stack and only send it requests (tests/live/conftest.py), or read files.
NOT_LIVE = (
    "live/test_first_light.py",
    "live/test_bad_input.py",
    "grafana/test_dashboard_files.py",
)
# Installed by `.ci/run`. A test that lacks one of them fails under CI and is skipped elsewhere.
INSTALLED_BY_CI = ("chromium", "clang++", "promtool", "prometheus", "ip", "redis-server")
QUICK_TIER = "quick"
TIERS = ("live", "native", "engines")  # also the names of their marks


def tier_of(path: str) -> str | None:
    """Return the tier of a file below tests/, or None if it is quick."""
    if _matches(path, NATIVE):
        return "native"
    if _matches(path, ENGINES) and not _matches(path, NOT_ENGINES):
        return "engines"
    if _matches(path, LIVE) and not _matches(path, NOT_LIVE):
        return "live"
    return None


def lacks_of_ci(reason: str) -> list[str]:
    """Return the programs that CI installs, that are missing on this machine, and that the reason
    of a skip names.
    """
    named = re.findall(r"[\w+-]+", reason)
    return [name for name in INSTALLED_BY_CI if name in named and shutil.which(name) is None]


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)
