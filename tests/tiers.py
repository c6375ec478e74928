"""Which `make` target runs a test: quick (`make test`), live or native, told by its path.

Nobody has to mark a test: what no pattern here matches is quick. A test that is unlike its file
says so itself, by `@pytest.mark.live` or `@pytest.mark.native`.
"""

from __future__ import annotations

from fnmatch import fnmatch

# Needs more than the ordinary build made: sanitizers, fuzzers, the CUDA emulator, nvcc.
NATIVE = (
    "kernels/test_cuda_*.py",
    "kernels/test_*_fuzz.py",
    "kernels/test_sanitized.py",
    "engine/test_kernel_emulated.py",
)
# Plans that are made on the host, in Python.
NOT_NATIVE = ("kernels/test_cuda_*_plan.py",)
# Starts programs to harm, replace or measure them, or needs a server, a browser, a client library.
LIVE = (
    "live/*.py",
    "grafana/test_*.py",
    "forks/*.py",
    "deploy/test_kubernetes.py",
    "server/test_relay_over_tls.py",
    "engine/test_instances_live.py",
    "engine/test_triton.py",
    "simulator/test_cli_ends.py",
    "simulator/test_demo.py",
    "simulator/test_page_in_browser.py",
    "simulator/test_stack.py",
    "simulator/test_sweep_dask.py",
)
# These share one stack and only ask it (tests/live/conftest.py), or read files.
NOT_LIVE = (
    "live/test_first_light.py",
    "live/test_bad_input.py",
    "grafana/test_dashboard_files.py",
)
QUICK_TIER = "quick"
TIERS = ("live", "native")  # also the names of their marks


def tier_of(path: str) -> str | None:
    """The tier of a file below tests/; None: quick."""
    if _matches(path, NATIVE) and not _matches(path, NOT_NATIVE):
        return "native"
    if _matches(path, LIVE) and not _matches(path, NOT_LIVE):
        return "live"
    return None


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)
