"""Advice beside the router: the process that makes it, its bounds, and what is shown of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec
import pytest

from policies.facts import WorkerFacts
from router.admin.advice import Advising, command_of
from router.cli.main import main
from router.config.schema import Advise, Config
from router.record.request_line import FleetPart
from router.record.request_log import fleet_parts
from router.settings.rules import check_together

SAYS_WHAT_IT_IS = """
import json, os, sys
path = next(a for a in sys.argv if a.startswith("--json=")).partition("=")[2]
json.dump({"nice": os.getpriority(os.PRIO_PROCESS, 0)}, open(path, "w"))
"""


class Instead(Advising):
    """Starts another program with the same arguments. Lifetime: test."""

    program = SAYS_WHAT_IT_IS

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.program, *super().command()[4:]]


def config(tmp_path: Path, **advise: object) -> Config:
    made = Advise(**{"every_s": 1.0, **advise})
    return Config(request_log=str(tmp_path / "log.jsonl"), advise=made)


async def test_what_a_process_wrote_is_shown(tmp_path: Path) -> None:
    advising = Instead(config(tmp_path, options=("profile=mine.json",)), lambda: 5.0)
    assert advising.shown()["advice"] is None
    await advising.once()
    shown = advising.shown()
    assert shown["advice"] == {"nice": os.getpriority(os.PRIO_PROCESS, 0)}
    assert (shown["failed"], shown["ended_at"], shown["running"]) == ("", 5.0, False)
    arguments = advising.command()
    assert "--profile=mine.json" in arguments
    assert arguments[-1] == str(tmp_path / "log.jsonl")


async def test_one_that_fails_says_why_and_one_that_hangs_is_ended(tmp_path: Path) -> None:
    advising = Instead(config(tmp_path))
    advising.program = "import sys; sys.exit('too short to tell')"
    await advising.once()
    assert advising.shown()["failed"] == "too short to tell"
    hanging = Instead(config(tmp_path, budget_s=1.0))
    hanging.program = "import signal; signal.pause()"
    await hanging.once()
    assert "took more than 1.5 s and was ended" in hanging.shown()["failed"]
    absent = Instead(config(tmp_path))
    absent.command = lambda: [str(tmp_path / "no such program")]  # type: ignore[method-assign]
    await absent.once()
    assert "No such file" in absent.shown()["failed"]


def test_a_file_that_is_no_advice_is_not_shown(tmp_path: Path) -> None:
    advising = Advising(config(tmp_path))
    (tmp_path / "log.jsonl.advice.json").write_text("{")
    shown = advising.shown()
    assert shown["advice"] is None
    assert "cannot be shown" in shown["failed"]
    assert Advising(Config()).shown()["advice"] is None
    assert not Advising(Config()).wanted


def test_bounds_come_first_so_that_options_may_change_them() -> None:
    command = command_of(["--budget=9", "log"], 5.0, 300)
    assert command[1:5] == ["-P", "-m", "simulator", "advise"]
    assert command.index("--budget=5") < command.index("--budget=9")
    assert {"--nice=10", "--memory-mb=300"} <= set(command)


def test_keys_that_do_not_go_together() -> None:
    assert "needs a log" in check_together(Config(advise=Advise(every_s=1.0)))[0]
    wrong = Config(request_log="x", advise=Advise(every_s=1.0, options=("--profile=x",)))
    assert "without --" in check_together(wrong)[0]


def test_the_command_starts_the_simulators_and_has_its_status(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"")
    assert main(["advise", str(log)]) == 2
    assert "holds no requests" in capfd.readouterr().err


def test_workers_that_are_alike_are_one_part_of_a_heading() -> None:
    alike = WorkerFacts("a", ("m",), 16, kv_capacity_tokens=1600.0)
    other = WorkerFacts("b", ("m",), 64, max_requests=8.0, role="decode")
    parts = fleet_parts([alike, other, alike])
    assert parts == (FleetPart(2, 16, 1600), FleetPart(1, 64, None, "decode", 8.0))
    told = json.loads(msgspec.json.encode(parts[0]))
    assert told == {"count": 2, "block_size": 16, "kv_tokens": 1600}
