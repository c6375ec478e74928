"""The JSON report: rows as they are, the seeds summed up, and what the caller says about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from simulator.report.aggregate import Aggregate, aggregate
from simulator.report.row import ReplayRow

FORMAT: Literal["warmroute-replay"] = "warmroute-replay"
VERSION: Literal[1] = 1


class ReportError(Exception):
    """A file that is no JSON report of this version."""


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file; docs/simulator.md, section "JSON". `version` grows when a field changes."""

    format: Literal["warmroute-replay"]
    version: Literal[1]
    about: dict[str, Any]
    results: tuple[ReplayRow, ...]
    policies: tuple[Aggregate, ...]


def encode(rows: Sequence[ReplayRow], about: Mapping[str, Any]) -> bytes:
    """The file's bytes: the same rows and the same `about` give the same."""
    report = Report(FORMAT, VERSION, dict(about), tuple(rows), aggregate(rows))
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def write_json(path: Path, rows: Sequence[ReplayRow], about: Mapping[str, Any]) -> None:
    """Writes the report; `about` is for whatever else msgspec can encode: set-up, version."""
    path.write_bytes(encode(rows, about))


def read_json(path: Path) -> Report:
    """A report as `write_json` wrote it; `ReportError` names the file and the field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except msgspec.DecodeError as error:
        raise ReportError(
            f"{path}: not a replay report of version {VERSION}: {error}; write it again with "
            "`warmroute-sim replay --json`"
        ) from error
