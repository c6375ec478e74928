"""Tests of how the relay's thread asks the kernel to be scheduled."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import kvkernels

LINUX = sys.platform == "linux"


def threads() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(not LINUX or kvkernels.Relay is None, reason="no relay was built")
def test_the_relay_thread_runs_with_batch_scheduling() -> None:
    before = threads()
    relay = kvkernels.Relay()
    try:
        (thread,) = threads() - before
        deadline = 100_000  # the thread says it first thing, when it gets its turn
        while os.sched_getscheduler(thread) != os.SCHED_BATCH and deadline:
            os.sched_yield()
            deadline -= 1
        assert os.sched_getscheduler(thread) == os.SCHED_BATCH
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    finally:
        relay.stop()
