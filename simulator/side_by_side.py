"""A function of many things, each call in a process of this machine; none outlives us."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker
from threading import Thread
from typing import TypeVar

from simulator.processes import StartError

T = TypeVar("T")
R = TypeVar("R")


def side_by_side(
    function: Callable[[T], R], things: Sequence[T], jobs: int
) -> Generator[tuple[T, R], None, None]:
    """Yields (thing, result) as they come, `jobs` at a time. What a call raises is raised here.

    Whatever ends this generator ends its processes; if this process is killed, they end
    themselves. Raises `StartError` when one of them is killed.
    """
    # Spawned, not forked: a child must not inherit half of what this process is doing.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(things)), spawn, _begin)
    with _ended(pool):
        with _deaf():
            tasks = {pool.submit(function, thing): thing for thing in things}
        for task in as_completed(tasks):
            try:
                yield tasks[task], task.result()
            except BrokenProcessPool as error:
                raise StartError(
                    "a process of this replay was killed; too little memory? fewer --jobs need less"
                ) from error


@contextmanager
def _ended(pool: ProcessPoolExecutor) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _deaf() -> Iterator[None]:
    """Ctrl-C in a terminal goes to all processes: ours ends the others.

    Blocked while they start, which they inherit, they never see it; here it comes a moment later.
    """
    resource_tracker.ensure_running()  # it unblocks the signal when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """What a child does first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed cannot end its children: they see it gone and end themselves."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
