"""Tests of the step log: it has a line for each step and ends before it fills the disk."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.cli.main import main
from engine.scheduler.types import Step
from engine.server.metrics import HEADER, StepLog


def a_step(number: int) -> Step:
    return Step(number, prefill_tokens=number, decode_ctx_tokens=7, attention_pairs=1.5)


def test_each_step_is_one_line_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    log = StepLog(path)
    log.note(a_step(3), 0.25)
    log.close()
    log.close()
    assert path.read_text() == f"{HEADER}3,0,0,7,1.5,0.250000000\n"


def test_a_full_log_ends_with_a_complete_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "steps.csv"
    log = StepLog(path, max_bytes=200)
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            log.note(a_step(number), 0.25)
    text = path.read_text()
    assert len(text) <= 200
    assert text.endswith("\n")
    assert [record.message for record in caplog.records] == [
        f"step log {path} is full: no further steps are written"
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_ends_the_log_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    log = StepLog(Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        for number in range(10_000):
            log.note(a_step(number), 0.25)
        log.close()
    assert caplog.records
    assert "No space left" in caplog.records[0].message


def test_the_error_names_a_log_file_that_cannot_be_created(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--timed", "llama-3.1-8b-h100", "--port", "0", "--step-log", "/dev/null/steps.csv"]
    assert main(flags) == 1
    assert "step log /dev/null/steps.csv: Not a directory" in capsys.readouterr().err
