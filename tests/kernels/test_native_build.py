"""Tests that each program refuses to start without a matching native build and names the command
that makes one.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAMS = {"router": "warmroute", "engine": "warmroute-engine", "simulator": "warmroute-sim"}
# Code that runs before any import: it gives a build that lacks everything, or no build.
OLDER = "from types import ModuleType\nsys.modules['kvkernels._native'] = ModuleType('_native')"
NONE = "sys.modules['kvkernels._native'] = None"
CALL = """
import sys
{build}
from {package}.__main__ import main
sys.argv = [{package!r}, "--help"]
main()
"""


@pytest.mark.parametrize("package", PROGRAMS)
@pytest.mark.parametrize("build", [OLDER, NONE])
def test_a_program_without_a_matching_native_build_prints_a_one_line_error(
    package: str, build: str
) -> None:
    code = CALL.format(build=build, package=package)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert line.startswith(f"{PROGRAMS[package]}: the native build of kvkernels is missing")
    assert "`pip install -e .`" in line
