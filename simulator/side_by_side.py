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
from types import FrameType
from typing import TypeVar

from simulator.processes import StartError

ENDINGS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
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
            process.kill()  # it has nothing to put away, and may not have begun to listen
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _deaf() -> Iterator[None]:
    """Nothing interrupts us half-way through starting a process: signals come a moment later.

    Blocked, which children inherit, so that they never see a Ctrl-C, which a terminal sends to all
    processes; and put off, for other threads of ours may still take a signal. Main thread only.
    """
    came: list[int] = []

    def put_off(number: int, frame: FrameType | None) -> None:
        came.append(number)

    resource_tracker.ensure_running()  # it unblocks signals when it starts
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    handlers = {number: signal.signal(number, put_off) for number in ENDINGS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for late in came:
            signal.raise_signal(late)


def _begin() -> None:
    """What a child does first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed cannot end its children: they see it gone and end themselves."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
