"""Tests of the programs as a user starts them: how they exit, and their error messages."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.live.commands import output_of
from tests.live.stack import MODEL, WAIT_S, engine_arguments, running

IGNORING = 'trap "" INT; exec "$@"'  # as a background job of a non-interactive shell
ROUTER = ["router", "serve", "--port", "0", "--admin-port", "0"]
ENGINE = ["engine", *engine_arguments()]


async def started(*module: str, shell: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *("sh", "-c", shell, "sh", sys.executable, "-m", *module),
        cwd=Path(__file__).parents[2],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


# SIGTERM is not ignored, so it ends the programs of all other tests, too.
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("module", [ROUTER, ENGINE], ids=["router", "engine"])
async def test_sigterm_and_sigint_end_a_program_started_with_sigint_ignored(module, number) -> None:
    process = await started(*module, shell=IGNORING)
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), WAIT_S)
        assert line.startswith(b"ready ")
        process.send_signal(number)
        await asyncio.wait_for(process.communicate(), WAIT_S)
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("module", "code", "says"),
    [
        (["engine"], 2, "required: --timed; see warmroute-engine --help"),
        (["engine", "--timed", "none"], 2, "; see warmroute-engine --help"),
        ([*ENGINE, "--port", "x"], 2, "argument --port: invalid int value: 'x'; see"),
        ([*ENGINE, "--host", "nohost.invalid"], 1, "on nohost.invalid: the host's name cannot be"),
        (
            ["router", "serve", "--prot", "1"],
            2,
            "--prot 1 (did you mean --port?); see",
        ),
        (["router", "serve", "--port"], 2, "one argument; see warmroute serve --help"),
        (["router", "serve", "--kv-stat", "x"], 2, "unrecognized arguments: --kv-stat x"),
        ([*ROUTER, "--host", "nohost.invalid"], 1, "on nohost.invalid, port 0: the host's name"),
    ],
)
async def test_wrong_arguments_give_a_one_line_error(module, code, says) -> None:
    status, said = await output_of(*module[1:], module=module[0])
    (line,) = [line for line in said.splitlines() if " INFO " not in line]
    assert says in line
    assert status == code
    assert "stopping" not in said


@pytest.mark.parametrize("flag", ["--port", "--admin-port", "--grpc-port"])
async def test_a_port_in_use_is_the_only_error_that_a_router_logs(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, said = await output_of(*ROUTER[1:], flag, str(port))
    *before, last = said.splitlines()
    shown = " (--grpc-port)" if flag == "--grpc-port" else ""
    assert f"cannot listen on 127.0.0.1, port {port}{shown}: address already in use" in last
    assert [line for line in before if "stopping" in line or "INFO" not in line] == []
    assert status == 1


async def test_a_router_without_workers_logs_how_to_add_workers(tmp_path) -> None:
    async with running(tmp_path, workers=0) as stack:
        (line,) = [r for r in stack.router.log.read_text().splitlines() if "WARNING" in r]
        assert "no worker to send requests to: start with --worker URL" in line
        assert f"POST one to {stack.admin}/workers" in line
        worker = await stack.programs.start("late", "engine", engine_arguments())
        await stack.add(worker.url)
        assert (await stack.complete([1], model=MODEL))[0] == 200
        assert f"worker 0 ({worker.url}) joined: kind warmroute" in stack.router.log.read_text()
