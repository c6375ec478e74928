"""A native build that does not fit is told of once by each program; that there is none, by none."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAMS = ("router.cli", "engine.cli", "simulator.cli")
# Each before anything is imported: a build without all that is wanted of it, and no build.
OLDER = "from types import ModuleType\nsys.modules['kvkernels._native'] = ModuleType('_native')"
NONE = "sys.modules['kvkernels._native'] = None"
CALL = """
import sys
{build}
from {program} import main
import kvkernels
assert kvkernels.NATIVE is {native}, kvkernels.UNUSABLE
main(["--help"])
"""


def stderr_of(program: str, build: str, native: bool) -> str:
    code = CALL.format(build=build, program=program, native=native)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("usage: ")
    return run.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_build_that_does_not_fit_is_loud(program: str) -> None:
    told = stderr_of(program, OLDER, False)
    (line,) = told.splitlines()
    assert line.startswith("warning: the native build of kvkernels does not fit: ")
    assert "cannot import name" in line
    assert "`pip install -e .`" in line


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(("build", "native"), [("", True), (NONE, False)])
def test_one_that_fits_is_silent_and_so_is_none(program: str, build: str, native: bool) -> None:
    assert stderr_of(program, build, native) == ""
