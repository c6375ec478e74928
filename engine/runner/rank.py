"""`python -m engine.runner.rank SPEC`: a process of a group, started by rank 0 (`group.py`)."""

from __future__ import annotations

import os
import signal
import sys
from queue import Queue
from threading import Thread

import msgspec

from engine.model.batch import FlatBatch
from engine.model.config import ModelError
from engine.runner.group import READY
from engine.runner.ranks import RankModel, RankSpec, read_batch
from engine.scheduler.scheduler import MAX_STEPS_IN_FLIGHT


def main() -> int:
    """Load, say so, and compute what comes until the input ends; the exit code."""
    # The terminal's Ctrl-C is for rank 0, which lets running requests end first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = msgspec.json.decode(sys.argv[1], type=RankSpec)
    try:
        model = RankModel(spec)
        os.write(1, READY)
        batches: Queue[FlatBatch | BaseException | None] = Queue(MAX_STEPS_IN_FLIGHT)
        Thread(target=_read, args=(batches, spec.own_device), daemon=True).start()
        while (batch := batches.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            model.compute(batch)
    except (ModelError, OSError, EOFError, RuntimeError) as error:
        print(f"warmroute-engine: rank {spec.rank}: {error}", file=sys.stderr, flush=True)
        return 1
    model.close()
    return 0


def _read(batches: Queue[FlatBatch | BaseException | None], device: str) -> None:
    """Take batches as they come, so that rank 0 need not wait until this rank has a turn."""
    try:
        while (batch := read_batch(sys.stdin.buffer, device)) is not None:
            batches.put(batch)
        batches.put(None)
    except BaseException as error:  # noqa: BLE001 - the rank ends with it
        batches.put(error)


if __name__ == "__main__":
    sys.exit(main())
