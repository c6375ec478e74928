"""Runs programs whose wall clocks are wrong by some seconds, or jump."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("shifted_clock.c")


class ShiftedClock:
    """A preloaded library that shifts a program's wall clock; without a C compiler, the test is
    skipped.

    Lifetime: test.
    """

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler (Debian package: gcc)")
        self._library = folder / "shifted_clock.so"
        command = [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
        subprocess.run([*command, str(_SOURCE), "-o", str(self._library), "-ldl"], check=True)

    def environment(self, shift_s: int) -> dict[str, str]:
        """Return the environment variables that shift a program's clock by `shift_s`."""
        return {"LD_PRELOAD": str(self._library), "SHIFTED_CLOCK_S": str(shift_s)}

    def jump(self, file: Path, shift_s: int) -> None:
        """Set the clocks of the programs started with `jumping(file)` to be off by `shift_s` from
        now on.
        """
        with file.open("r+b" if file.exists() else "w+b") as opened:
            opened.write(struct.pack("=q", shift_s))

    def off_by(self, shift_s: int) -> AbstractContextManager[None]:
        """Shift the clock of programs started during the block; this process keeps the
        right time.
        """
        return self._with(self.environment(shift_s))

    def jumping(self, file: Path) -> AbstractContextManager[None]:
        """Give programs started during the block a clock that is shifted at any time by what `file`
        says.
        """
        self.jump(file, 0)
        return self._with({"LD_PRELOAD": str(self._library), "SHIFTED_CLOCK_FILE": str(file)})

    @contextmanager
    def _with(self, environment: dict[str, str]) -> Iterator[None]:
        before = os.environ.copy()
        os.environ.update(environment)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
