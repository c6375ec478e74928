"""Each step as a line of CSV: what it computed and how long it took. To calibrate by."""

from __future__ import annotations

import logging
from pathlib import Path

from engine.step_time import StepLoad

HEADER = "prefill_tokens,prefill_seqs,decode_seqs,decode_ctx_tokens,attention_pairs,seconds\n"
BUFFER_BYTES = 1 << 16
MAX_BYTES = 1 << 30  # then it stops: a log that nobody looks at must not fill the disk

log = logging.getLogger(__name__)


class StepLogError(Exception):
    """The file cannot be made: says which, and why."""


class StepLog:
    """An open file, new each time. Lifetime: process. Raises `StepLogError`."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._left_bytes = max_bytes - len(HEADER)
        try:
            self._file = path.open("w", encoding="ascii", buffering=BUFFER_BYTES)
        except OSError as error:
            raise StepLogError(f"step log {path}: {error.strerror or error}") from error
        self._file.write(HEADER)

    def note(self, load: StepLoad, seconds: float) -> None:
        """Add a step. A full disk or a full log ends the logging, not the worker."""
        if self._file.closed:
            return
        line = (
            f"{load.prefill_tokens},{load.prefill_seqs},{load.decode_seqs},"
            f"{load.decode_ctx_tokens},{load.attention_pairs:.1f},{seconds:.9f}\n"
        )
        self._left_bytes -= len(line)
        if self._left_bytes < 0:
            log.warning("step log %s is full: no further steps are written", self._path)
            self.close()
            return
        try:
            self._file.write(line)
        except OSError as error:
            log.warning("step log %s: %s: no further steps are written", self._path, error)
            self.close()

    def close(self) -> None:
        """Write what is buffered; a second time does nothing."""
        try:
            self._file.close()
        except OSError as error:  # the last lines did not fit the disk
            log.warning("step log %s: %s: it may lack its last lines", self._path, error)
