"""What a process uses of its machine."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path

_STATM = Path("/proc/self/statm")  # Linux: sizes in pages, the second one resident


@dataclass(frozen=True, slots=True)
class Usage:
    """As of one moment."""

    cpu_s: float  # user and system
    resident_bytes: int  # 0 where the system does not tell


def used_here() -> Usage:
    """By this process."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except OSError:
        pages = 0
    return Usage(time.process_time(), pages * resource.getpagesize())
