"""The router's memory in pages of 2 MB, where the system has such for programs that ask.

A request touches some hundred objects all over the heap. On a virtual machine each page that the
processor has to find is looked up in two sets of tables, the guest's and the host's; fewer pages
are fewer of these walks (`docs/performance.md`). Linux calls them transparent huge pages
(Documentation/admin-guide/mm/transhuge.rst; MADV_COLLAPSE of madvise(2), from Linux 6.1 on).
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

log = logging.getLogger(__name__)

PAGE_BYTES = 2 << 20
WAITS_S = (0.0, 20.0, 120.0, 900.0)  # before each pass: the heap grows with the first traffic
_COLLAPSE = 25  # MADV_COLLAPSE
_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPS = Path("/proc/self/smaps")
# Private, writable, of no file: the heap, Python's arenas, the tables of indexes and mirrors.
_ANONYMOUS = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ 00:00 0 *(?:\[heap\])?\n", re.MULTILINE
)
_RESIDENT = re.compile(r"^Rss: +([0-9]+) kB", re.MULTILINE)


async def keep(waits_s: Iterable[float] = WAITS_S) -> None:
    """Gather memory in large pages now and as the heap grows; returns after the last pass.

    The event loop goes on meanwhile. Does nothing where the system has none, or shall have none.
    """
    loop = asyncio.get_running_loop()
    for wait_s in waits_s:
        await asyncio.sleep(wait_s)
        if not wanted():
            return
        log.debug("%d large pages", await loop.run_in_executor(None, gather))


def wanted(switch: Path = _SWITCH) -> bool:
    """The system gives them to whoever asks; not where an operator has said `never`."""
    try:
        return "[never]" not in switch.read_text()
    except OSError:  # another system, or one built without
        return False


def gather() -> int:
    """Put what is resident into large pages; how many of these there are.

    One at a time, so that nobody who touches the memory meanwhile waits for more than one copy.
    What cannot be had, for want of memory or by an older system, stays as it is.
    """
    collapse = _collapse()
    if collapse is None:
        return 0
    try:
        text = _MAPS.read_text()
    except OSError:
        return 0
    return sum(collapse(at) for begin, end in filled(text) for at in range(begin, end, PAGE_BYTES))


def filled(smaps: str) -> Iterator[tuple[int, int]]:
    """Of the text of /proc/self/smaps the ranges that pay: whole large pages, as addresses, of
    what is at least half in use. The rest, as threads' stacks, would become resident by it.
    """
    for one in _ANONYMOUS.finditer(smaps):
        resident = _RESIDENT.search(smaps, one.end())
        begin, end = int(one[1], 16), int(one[2], 16)
        if resident is None or int(resident[1]) * 1024 * 2 < end - begin:
            continue
        begin, end = -(-begin // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES
        if begin < end:
            yield begin, end


def _collapse() -> Callable[[int], bool] | None:
    """Makes one large page at an address, and says whether there is one; None: not here."""
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return lambda at: madvise(at, PAGE_BYTES, _COLLAPSE) == 0
