"""Processes that run no more for a while."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_WAIT_S = 30.0


def freeze(pid: int) -> None:
    """Stop it, and return when each of its threads has: the signal alone comes to them later."""
    os.kill(pid, signal.SIGSTOP)
    until_s = time.monotonic() + _WAIT_S
    while not all(_has_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < until_s, f"process {pid} does not stop"
        time.sleep(1e-3)


def _has_stopped(task: Path) -> bool:
    state = (task / "stat").read_text().rpartition(")")[2].split()[0]
    return state in ("T", "t")


def runs(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
