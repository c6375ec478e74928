"""Tests of profiles made from a real engine's step log: replays and engines take them by name."""

from __future__ import annotations

import asyncio
import csv
import json
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.profiles import profile
from simulator.calibrate.fit import read_step_log
from simulator.live.processes import Programs
from tests.simulator.cli_support import Run, report, run, trace

__all__ = ["run"]
PROFILE = "llama-3.1-8b-h100"


async def log_steps(folder: Path) -> Path:
    """Send some load to a simulated engine; return the path of its step log."""
    log = folder / "steps.csv"
    async with Programs(folder / "logs") as programs, aiohttp.ClientSession() as http:
        arguments = ["--port", "0", "--timed", PROFILE, "--model-name", "m", "--speed", "2"]
        engine = await programs.start("worker", "engine", [*arguments, "--step-log", str(log)])

        async def ask(number: int, tokens: int, output: int) -> None:
            prompt = [(97 * number + n) % 30_000 for n in range(tokens)]
            body = {"model": "m", "prompt": prompt, "max_tokens": output}
            async with http.post(f"{engine.url}/v1/completions", json=body) as reply:
                assert reply.status == 200

        for tokens in (300, 900, 2700, 8000):
            await ask(tokens % 97, tokens, 2)
        await asyncio.gather(*(ask(200 + n, 200 + 150 * n, 20 + n) for n in range(24)))
    return log


def timed_exactly(log: Path) -> None:
    """Replace the duration of each step in the log by the profile's, because a busy machine sleeps
    too long.
    """
    step_time = profile(PROFILE).step_time
    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row, (step,) in zip(rows, (o.loads for o in read_step_log(log)), strict=True):
        row["seconds"] = str(step_time.seconds(step))
    with log.open("w", newline="") as file:
        written = csv.DictWriter(file, rows[0].keys())
        written.writeheader()
        written.writerows(rows)


async def start_with(profile: Path, folder: Path) -> str:
    """Return the KV capacity in tokens that an engine simulated by `profile` reports."""
    async with Programs(folder) as programs:
        engine = await programs.start("worker", "engine", ["--port", "0", "--timed", str(profile)])
        return engine.facts["kv_tokens"]


def test_a_step_log_becomes_a_profile_for_all_commands(run: Run, tmp_path: Path) -> None:
    log, mine = asyncio.run(log_steps(tmp_path)), tmp_path / "mine.json"
    timed_exactly(log)
    without = run("calibrate", log, "--out", mine)
    assert without.status == 2
    assert "--kv-tokens is needed" in without.err
    assert not mine.exists()

    said = run("calibrate", log, "--kv-tokens", "30k", "--out", mine)
    assert said.status == 0, said.err
    assert f"{mine}: use it as --profile {mine}" in said.out
    fitted = json.loads(mine.read_text())
    assert (fitted["name"], fitted["kv_capacity_tokens"]) == ("mine", 30_000)

    found = tmp_path / "r.json"
    asked = ("replay", trace(tmp_path), "--workers", "2", "--policy", "hybrid", "--json", found)
    assert run(*asked, "--profile", mine).status == 0
    measured = report(found)[0]["ttft_ms"]["mean"]
    assert run(*asked, "--profile", PROFILE, "--kv-tokens", "30k").status == 0
    assert measured == pytest.approx(report(found)[0]["ttft_ms"]["mean"], rel=0.05)

    assert asyncio.run(start_with(mine, tmp_path / "again")) == "30000"


def test_all_commands_refuse_a_bad_profile(run: Run, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"name": "x"}')
    for command in (
        ("replay", trace(tmp_path), "--profile", bad),
        ("plan", trace(tmp_path), "--profile", bad, "--ttft-p90-ms", "9"),
        ("bound", trace(tmp_path), "--profile", bad),
        ("replay", trace(tmp_path), "--group", f"count=2,profile={bad}"),
    ):
        said = run(*command)
        assert said.status == 2
        assert f"profile {bad}: " in said.err
        assert "step_time" in said.err


@contextmanager
def live_engine(folder: Path) -> Iterator[str]:
    """Yield the URL of a quick engine that runs in a thread while a command runs in the main
    thread.
    """
    loop, programs = asyncio.new_event_loop(), Programs(folder)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def done(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    arguments = ["--port", "0", "--timed", PROFILE, "--model-name", "m", "--speed", "4"]
    try:
        done(programs.__aenter__())
        yield done(programs.start("worker", "engine", arguments)).url
    finally:
        done(programs.__aexit__(None, None, None))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_a_live_engine_becomes_a_profile(run: Run, tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    with live_engine(tmp_path / "logs") as url:
        said = run("calibrate", url, "--out", mine, "--max-prompt-tokens", "4k")
    assert said.status == 0, said.err
    assert f"{mine}: use it as --profile {mine}" in said.out
    profile = json.loads(mine.read_text())
    assert profile["kv_capacity_tokens"] > 100_000, "as the engine's metrics say"
    assert "a live engine" in profile["provenance"]


def test_validate_compares_the_replay_with_a_live_stack(run: Run, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    asked = ("validate", trace(tmp_path), "--workers", "2", "--live-speed", "4")
    said = run(*asked, "--policy", "round_robin", "--json", found, "--out", tmp_path / "out")
    assert said.status in (0, 1), said.err  # a busy machine may differ from the model
    (row,) = json.loads(found.read_text())
    assert row["policy"] == "round_robin"
    assert "round_robin" in said.out
