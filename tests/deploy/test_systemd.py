"""Tests of docs/deploy/*.service: systemd accepts them, and their times fit the router's."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from router.settings.schema import Config
from tests.deploy.parsed import DEPLOY

UNITS = sorted(DEPLOY.glob("*.service"))
PROGRAM = re.compile(r"/opt/warmroute/\.venv/bin/[\w-]+")


def service(name: str) -> dict[str, str]:
    """Return the keys that occur once in the unit's [Service] section."""
    text = (DEPLOY / name).read_text(encoding="utf-8").partition("[Service]\n")[2]
    return dict(re.findall(r"^(\w+)=(.*)$", text.partition("\n[")[0], re.MULTILINE))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_the_units(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (Debian package: systemd)")
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    name = unit.name.replace("@", "@8001")
    (tmp_path / name).write_text(PROGRAM.sub(str(program), unit.read_text(encoding="utf-8")))
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    told = [line for line in checked.stderr.splitlines() if name in line]
    assert (checked.returncode, told) == (0, [])


def test_a_hanging_router_is_ended_and_restarted() -> None:
    keys = service("warmroute.service")
    assert (keys["Type"], keys["NotifyAccess"]) == ("notify", "all")
    assert keys["Restart"] == "on-failure"  # it includes an end by the watchdog
    # The router itself notices a hanging policy first, and names it in the log.
    assert int(keys["WatchdogSec"]) > 1.5 * Config().policy_hang_s


def test_a_router_has_time_to_stop() -> None:
    keys = service("warmroute.service")
    assert int(keys["TimeoutStopSec"]) > 2 * Config().timeouts.shutdown_s
