"""Rank 0's ends of the pipes to another rank's process, with limits to every wait."""

from __future__ import annotations

import os
import select
import subprocess
import time


class RankStuck(RuntimeError):  # noqa: N818 - what happened, not a kind of mistake
    """A rank lives and does nothing: stopped, or it hangs."""


def give(process: subprocess.Popen[bytes], data: bytes, limit_s: float) -> None:
    """Write `data` to the process's standard input, within `limit_s`.

    Raises RankStuck where it does not take them, OSError where it is gone.
    """
    assert process.stdin is not None
    pipe = process.stdin.fileno()
    os.set_blocking(pipe, False)
    poll, left = select.poll(), memoryview(data)
    poll.register(pipe, select.POLLOUT)
    until_s = time.monotonic() + limit_s
    while left:
        if not poll.poll(max(0.0, until_s - time.monotonic()) * 1e3):
            raise RankStuck(f"took no batch for {limit_s:g} s: it is stopped, or hangs")
        left = left[os.write(pipe, left) :]


def line_of(process: subprocess.Popen[bytes], limit_s: float) -> bytes:
    """A line of its standard output; what there is of it where that ends. RankStuck: none came."""
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout.fileno(), select.POLLIN)
    if not poll.poll(limit_s * 1e3):
        raise RankStuck(f"did not say that it has loaded for {limit_s:g} s")
    return process.stdout.readline()
