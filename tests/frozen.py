"""Stops processes, or single threads of them, for a while."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_WAIT_S = 30.0
_DETACH, _SEIZE, _INTERRUPT = 17, 0x4206, 0x4207  # ptrace(2)


def freeze(pid: int) -> None:
    """Stop a process, and return when each of its threads has stopped, since the signal reaches
    threads later.
    """
    os.kill(pid, signal.SIGSTOP)
    until_s = time.monotonic() + _WAIT_S
    while not all(_has_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < until_s, f"process {pid} does not stop"
        time.sleep(1e-3)


@contextmanager
def thread_frozen(pid: int, name: str) -> Iterator[None]:
    """Stop one thread of a process during the block while its others run. Skips the test if this
    user may not do that.
    """
    tasks = Path(f"/proc/{pid}/task").iterdir()
    (task,) = [task for task in tasks if (task / "comm").read_text().strip() == name]
    try:
        _ptrace(_SEIZE, int(task.name))
    except PermissionError:
        pytest.skip("this user may not trace other processes (ptrace)")
    try:
        _ptrace(_INTERRUPT, int(task.name))
        until_s = time.monotonic() + _WAIT_S
        while not _has_stopped(task):
            assert time.monotonic() < until_s, f"thread {name} does not stop"
            time.sleep(1e-3)
        yield
    finally:
        _ptrace(_DETACH, int(task.name))


def _ptrace(request: int, thread: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    if libc.ptrace(request, thread, 0, 0) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _has_stopped(task: Path) -> bool:
    state = (task / "stat").read_text().rpartition(")")[2].split()[0]
    return state in ("T", "t")


def runs(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
