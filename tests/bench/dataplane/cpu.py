"""Reads the CPU time and memory of a process tree from the kernel."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_KB = os.sysconf("SC_PAGE_SIZE") // 1024


def tree(pid: int) -> list[int]:
    """Return the ids of the process and all its descendants."""
    found = [pid]
    for parent in found:  # grows as it goes
        for task in _tasks(parent):
            with suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def cpu_s(pid: int) -> float:
    """Return the CPU seconds, user and system, of all living threads of the tree, to the
    nanosecond.
    """
    total_ns = 0
    for process in tree(pid):
        for task in _tasks(process):
            with suppress(OSError):
                total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def loop_s(pid: int) -> float:
    """Return the CPU seconds of the process's first thread, which runs our router's event loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def rss_kb(pid: int) -> int:
    """Return the tree's resident memory in KB; pages that processes share count for each."""
    total = 0
    for process in tree(pid):
        with suppress(OSError):
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE_KB
    return total


def busy_s() -> float:
    """Return the CPU seconds of all cores since the system's start, stolen time included."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / _TICKS


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
