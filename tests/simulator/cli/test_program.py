"""Tests of `warmroute-sim` as a process: its exit status and its output."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from pathlib import Path

import pytest

from simulator.cli import main
from simulator.cli.command_line import read_arguments
from simulator.cli.live import check_stack
from tests.simulator.endpoint import Endpoint, serve, until

TIMEOUT_S = 60.0
ROW = '{"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": [1]}\n'


LOAD = ("load", "http://127.0.0.1:1")
SHARED = ("--shared-prefix", "60+7")
TRACE = ("--trace", "t.jsonl")
# Shells without job control start background programs in this way.
DEAF = ("sh", "-c", """trap '' INT TERM; exec "$@" """, "sh")


async def start(*arguments: str, before: tuple[str, ...] = ()) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *before,
        sys.executable,
        "-m",
        "simulator",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def finish(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    async with asyncio.timeout(TIMEOUT_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def test_help_shows_commands_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for word in ("demo", "load", "stack", "examples:"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["demo", "--trace", "/nowhere/t.jsonl"], "/nowhere/t.jsonl"),
        (["load", "http://127.0.0.1:1"], "--trace"),
        (["load", "ftp://x", "--shared-prefix", "60+7"], "http://HOST:PORT"),
        (["load", "http://127.0.0.1:1", "--shared-prefix", "60x7"], "6000+700"),
        (["load", "http://127.0.0.1:1", "--shared-prefix", "0+7"], "above 0"),
        (["load", "http://127.0.0.1:1", "--shared-prefix", "99999999999+7"], "expected 1200"),
        (["load", "http://127.0.0.1:1", "--shared-prefix", "6+7", "--vocabulary", "9"], "above"),
        (["load", "http://127.0.0.1:1", "--trace", "/nowhere/t.jsonl"], "/nowhere/t.jsonl"),
        ([*LOAD, *SHARED, "--rate", "-1"], "above 0"),
        (["stack", "--port", "65536"], "not a port"),
        (["stack", "--port", "9", "--admin-port", "9"], "choose two"),
        (["stack", "--profile", "nope"], "llama-3.1-8b-h100, "),
        (["stack", "--policy", "nope"], "kv_prefix, "),
        (["stack", "--policy", "hybrid?nope=1"], "nope"),
        (["stack", "--requests", "3"], "--requests is for --trace"),
        (["stack", "--seconds", "3"], "--seconds is for --trace"),
        (["stack", "--spread", "3"], "--spread is for --trace"),
        (["stack", "--block-tokens", "16"], "--block-tokens is for --trace"),
        ([*LOAD, *SHARED, "--spread", "3"], "--spread is for --trace"),
        ([*LOAD, *SHARED, "--seconds", "3"], "--seconds is for --trace"),
        ([*LOAD, *SHARED, "--rate", "3", "--concurrency", "2"], "--rate sets times"),
        ([*LOAD, *SHARED, "--speed", "3", "--concurrency", "2"], "--speed sets times"),
        ([*LOAD, *TRACE, "--spread", "3", "--concurrency", "2"], "--spread sets times"),
        ([*LOAD, *TRACE, "--rate", "3"], "--rate is for --shared-prefix"),
        ([*LOAD, *TRACE, "--groups", "3"], "--groups is for --shared-prefix"),
        ([*LOAD, *SHARED, "--json", "/nowhere/r.json"], "no folder /nowhere"),
        ([*LOAD, *SHARED, "--html", "/"], "is a folder"),
        (["stack", "--out", "/dev/null/x"], "cannot be made"),
        (["demo", "--out", "/dev/null"], "cannot be made"),
    ],
)
def test_wrong_usage_exits_with_2_and_the_reason(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    assert said in capsys.readouterr().err


def test_an_unreachable_endpoint_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LOAD, *SHARED]) == 1
    assert "nothing answers at http://127.0.0.1:1 " in capsys.readouterr().err


async def test_the_error_for_an_endpoint_without_models_names_the_model_flag() -> None:
    async with serve(Endpoint()) as endpoint:
        status, _, err = await finish(await start("load", f"{endpoint.url}/elsewhere", *SHARED))
    assert status == 1
    assert "lists no model" in err
    assert "--model" in err


def test_a_users_policy_is_found_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "def costs(request, fleet, state):\n    return fleet.id * 1.0\n"
    (tmp_path / "mine_alone.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    _, options = read_arguments(["stack", "--policy", "mine_alone:costs"])
    check_stack(options)


def test_the_error_for_a_port_in_use_names_the_flag_to_change(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option, other in (("--port", "--admin-port"), ("--admin-port", "--port")):
            arguments = ["stack", option, str(port), other, "0", "--out", str(tmp_path)]
            assert main(arguments) == 1
            said = capsys.readouterr().err
            assert f"port {port} of 127.0.0.1" in said
            assert f"choose another with {option} PORT" in said


async def test_load_reports_the_outcomes(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(ROW * 4)
    async with serve(Endpoint(lambda number: "bad" if number == 3 else "ok")) as endpoint:
        status, out, _ = await finish(
            await start(
                "load",
                endpoint.url,
                "--trace",
                str(trace),
                "--model",
                "demo",
                "--json",
                str(tmp_path / "r.json"),
                "--html",
                str(tmp_path / "r.html"),
            )
        )
    assert status == 1, "a lost request is not a success"
    assert "HTTP 400" in out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["results"][0]["completed"] == 3
    assert report["results"][0]["failed"] == 1
    assert len(report["outcomes"]) == 4
    page = (tmp_path / "r.html").read_text()
    assert "trace.jsonl" in page
    assert f"<h1>Load test of {endpoint.url.removeprefix('http://')}</h1>" in page
    assert "milliseconds of wall time" in page


async def test_load_limits_requests_and_accepts_a_url_with_v1() -> None:
    async with serve(Endpoint()) as endpoint:
        status, out, err = await finish(
            await start(
                "load",
                f"{endpoint.url}/v1/",
                "--shared-prefix",
                "60+20",
                "--requests",
                "7",
                "--groups",
                "2",
                "--concurrency",
                "2",
            )
        )
    assert status == 0, err
    assert len(endpoint.bodies) == 7
    assert endpoint.bodies[0]["model"] == "served"
    assert "generator late" in out


@pytest.mark.live
@pytest.mark.parametrize(
    ("number", "before"),
    [
        (signal.SIGINT, ()),
        (signal.SIGTERM, DEAF),
        pytest.param(signal.SIGTERM, (), marks=pytest.mark.full),
        pytest.param(signal.SIGINT, DEAF, marks=pytest.mark.full),
    ],
    ids=["heeded-INT", "ignored-TERM", "heeded-TERM", "ignored-INT"],
)
async def test_an_interrupted_load_shows_the_outcomes_so_far(
    number: signal.Signals, before: tuple[str, ...]
) -> None:
    async with serve(Endpoint(lambda number: "ok" if number < 3 else "silent")) as endpoint:
        process = await start(
            "load", endpoint.url, "--shared-prefix", "60+20", "--requests", "5", "--rate", "100",
            before=before,
        )  # fmt: skip
        await until(lambda: endpoint.running == 2 and len(endpoint.bodies) == 5)
        process.send_signal(number)
        status, out, err = await finish(process)
        await until(lambda: endpoint.gone == 2)
    assert status == 130
    assert "3 of 3 completed" in out
    assert "stopped" in err
