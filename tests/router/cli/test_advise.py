"""Tests of `warmroute advise`, which runs the simulator's command at low priority, with limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.cli.main import advise_command, main


def test_default_limits_come_first_so_that_options_override_them() -> None:
    command = advise_command(["--budget=9", "log"])
    assert command[1:5] == ["-P", "-m", "simulator", "advise"]
    assert command.index("--budget=3600") < command.index("--budget=9")
    assert {"--nice=10", "--memory-mb=4096"} <= set(command)


def test_the_command_runs_the_simulator_and_returns_its_exit_status(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"")
    assert main(["advise", str(log)]) == 2
    assert "holds no requests" in capfd.readouterr().err
