"""Compiles the bench's C++ programs: the dummy engines and the load generator."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
BUILT = HERE.parents[2] / "build" / "bench"


def built(name: str) -> Path:
    """Return the program compiled from `name.cpp`; compile it if a source is newer.

    Raises RuntimeError with the compiler's message, or if there is no compiler.
    """
    program = BUILT / name
    sources = [HERE / f"{name}.cpp", *HERE.glob("*.h")]
    if program.exists() and program.stat().st_mtime > max(s.stat().st_mtime for s in sources):
        return program
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("no C++ compiler; install g++")
    BUILT.mkdir(parents=True, exist_ok=True)
    fresh = program.with_suffix(f".{os.getpid()}")  # another run may make or use it, too
    command = [compiler, "-std=c++20", "-O2", "-o", str(fresh), str(sources[0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"cannot compile {sources[0]}:\n{done.stderr[-4000:]}")
    fresh.replace(program)
    return program
