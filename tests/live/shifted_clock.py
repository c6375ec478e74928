"""Programs whose clocks on the wall are wrong, by so many seconds."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("shifted_clock.c")


class ShiftedClock:
    """Skips where no C compiler is. Lifetime: test."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler (Debian package: gcc)")
        self._library = folder / "shifted_clock.so"
        command = [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
        subprocess.run([*command, str(_SOURCE), "-o", str(self._library), "-ldl"], check=True)

    def environment(self, shift_s: int) -> dict[str, str]:
        """What a program has to have in its environment."""
        return {"LD_PRELOAD": str(self._library), "SHIFTED_CLOCK_S": str(shift_s)}

    @contextmanager
    def off_by(self, shift_s: int) -> Iterator[None]:
        """Programs started meanwhile have such a clock; this one does not."""
        before = os.environ.copy()
        os.environ.update(self.environment(shift_s))
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
