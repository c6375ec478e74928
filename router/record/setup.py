"""The logs and recordings of a router, opened as configured."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from router.config.schema import Config
from router.core.core import RouterCore
from router.record.access_log import AccessLog, access_log
from router.record.log_files import PartLimits, Parts
from router.record.recorder import FactRecorder
from router.record.request_line import Header
from router.record.request_log import LineFile, RequestLog, request_log_file
from router.record.salt import Salt


def request_log_of(
    config: Config, core: RouterCore, workers: Callable[[], int]
) -> RequestLog | None:
    """The log that replays read, a file or a folder of parts. Raises OSError."""
    file: LineFile
    salt: Salt
    if config.record is not None:
        keeping = config.recording
        limits = (keeping.part_bytes, keeping.part_s, keeping.parts, keeping.total_bytes)
        file = parts = Parts(Path(config.record), PartLimits(*limits), time.time)
        salt = parts.salt
    elif config.request_log is not None:
        file, salt = request_log_file(Path(config.request_log), config.request_log_bytes)
    else:
        return None

    def header(started: float) -> Header:
        return Header(round(started, 6), core.policy.spec, workers())

    return RequestLog(file, salt, time.monotonic, time.time, header)


def access_log_of(config: Config) -> AccessLog | None:
    """Raises OSError."""
    if config.access_log is None:
        return None
    return access_log(config.access_log, config.access_log_bytes, time.time() - time.monotonic())


def recorder_of(config: Config, core: RouterCore) -> FactRecorder | None:
    """The recording of facts. Raises OSError."""
    if config.record_facts is None:
        return None
    path = Path(config.record_facts)
    return FactRecorder(path, config.record_facts_bytes, core, config.seed)
