"""Tests of programs started in a folder whose modules have the same names as ours or as
libraries.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from tests.live.stack import WAIT_S

BIN = Path(sys.executable).parent
TAKEN = ("router", "simulator", "engine", "policies", "kvkernels", "numpy", "aiohttp")
OWN = "def own(request, fleet, state):\n    return fleet.requests + 0.0\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with one usable policy; any other module there ends the program that imports
    it.
    """
    for name in TAKEN:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the folder')\n")
    (tmp_path / "my_routing.py").write_text(OWN)
    return tmp_path


async def started(folder: Path, program: str, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(str(BIN / program), *arguments),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def ended(folder: Path, program: str, *arguments: str) -> tuple[int | None, str]:
    process = await started(folder, program, *arguments)
    said, _ = await asyncio.wait_for(process.communicate(), 4 * WAIT_S)
    return process.returncode, said.decode()


async def test_the_advise_command_ignores_modules_of_the_current_folder(folder: Path) -> None:
    code, said = await ended(folder, "warmroute", "advise", "--help")
    assert (code, "usage: warmroute-sim advise" in said) == (0, True), said


async def test_the_stack_command_loads_only_the_policy_from_the_current_folder(
    folder: Path,
) -> None:
    policy = ("--policy", "my_routing:own")
    ports = ("--port", "0", "--admin-port", "0")
    process = await started(folder, "warmroute-sim", "stack", "--workers", "1", *policy, *ports)
    assert process.stdout is not None
    told = []
    try:
        while line := (await asyncio.wait_for(process.stdout.readline(), 4 * WAIT_S)).decode():
            told.append(line)
            if "Ctrl-C ends all" in line:
                break
        assert "Ctrl-C ends all" in "".join(told), "".join(told)
        assert '"model": "warmroute-timed"' in "".join(told), "as in docs/quickstart.md"
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), 4 * WAIT_S)


async def test_the_router_loads_a_policy_of_the_current_folder_and_names_clashes(
    folder: Path,
) -> None:
    file = folder / "router.yaml"
    file.write_text("policy: my_routing:own\n")
    code, said = await ended(folder, "warmroute", "config", "--check", "router.yaml")
    assert code == 0, said
    file.write_text("policy: router:Mine\n")
    code, said = await ended(folder, "warmroute", "config", "--check", "router.yaml")
    assert code == 2
    assert "router.py was not asked, for router is an installed module" in said
    assert "give yours another name" in said
