"""Programs whose clocks on the wall are wrong, by so many seconds, or jump."""

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

    def jump(self, file: Path, shift_s: int) -> None:
        """The clocks of programs started with `jumping` by this file are so far off from now on."""
        with file.open("r+b" if file.exists() else "w+b") as opened:
            opened.write(struct.pack("=q", shift_s))

    def off_by(self, shift_s: int) -> AbstractContextManager[None]:
        """Programs started meanwhile have such a clock; this one does not."""
        return self._with(self.environment(shift_s))

    def jumping(self, file: Path) -> AbstractContextManager[None]:
        """Programs started meanwhile have a clock that jumps to what `file` says at any time."""
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
