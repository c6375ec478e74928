"""Tests of `plan`, `sweep`, `hits`, `bound`, `sources` and `check-facts`: runs on good input and
what they write.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from router.record.facts import framed, records
from simulator.traces.formats import FORMATS
from simulator.traces.generators.table import GENERATORS
from tests.router.core.core_world import stored
from tests.router.record.record_play_support import RecordedDispatcher
from tests.simulator.cli_support import FLEET, REQUESTS, Run, run, trace

__all__ = ["run"]
SWEEP = """\
workload: {{source: {trace}}}
fleet: {{profile: llama-3.1-8b-h100, count: 2}}
grid: {{policies: [round_robin, hybrid], workers: [1, 2]}}
"""


def test_plan_prints_writes_and_keeps_its_result(run: Run, tmp_path: Path) -> None:
    found, results = tmp_path / "plan.json", tmp_path / "results.jsonl"
    wanted = ("--seed", "1", "--jobs", "1", "--json", found, "--results", results)
    target = ("--ttft-p90-ms", "5000")
    asked = ("plan", trace(tmp_path), *FLEET, "--policy", "hybrid", *target, *wanted)
    said = run(*asked)
    assert said.status == 0, said.err
    assert "Take hybrid on 1 worker (1 GPUs)." in said.out
    plan = json.loads(found.read_text())
    assert plan["best"] == "hybrid"
    assert plan["rows"][0]["answer"] == 1
    kept = results.read_bytes()
    again = run(*asked)
    assert again.status == 0
    assert results.read_bytes() == kept, "nothing was run again"


def test_a_plan_without_an_answer_exits_with_1(run: Run, tmp_path: Path) -> None:
    said = run(
        *("plan", trace(tmp_path), "--profile", "llama-3.1-8b-h100", "--policy", "hybrid"),
        *("--ttft-p90-ms", "0.1", "--most-workers", "2", "--seed", "1", "--jobs", "1"),
    )
    assert said.status == 1
    assert "No policy keeps the targets" in said.out
    assert "even 2 workers miss TTFT p90" in said.out


def test_a_plan_finds_the_highest_rate(run: Run, tmp_path: Path) -> None:
    said = run(
        *("plan", trace(tmp_path), *FLEET, "--policy", "hybrid", "--ttft-p90-ms", "200"),
        *("--max-rate", "--seed", "1", "--jobs", "1"),
    )
    assert said.status == 0, said.err
    assert "hybrid takes " in said.out
    assert "requests/s on 2 GPUs" in said.out


def test_a_sweep_writes_its_reports_and_resumes(run: Run, tmp_path: Path) -> None:
    sheet = tmp_path / "sweep.yaml"
    sheet.write_text(SWEEP.format(trace=trace(tmp_path)))
    files = {name: tmp_path / f"s.{name}" for name in ("csv", "json", "html")}
    wanted = [text for name, path in files.items() for text in (f"--{name}", path)]
    said = run("sweep", sheet, "--jobs", "1", *wanted)
    assert said.status == 0, said.err
    runs = json.loads(files["json"].read_text())["runs"]
    with files["csv"].open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(runs) == len(lines) == 4
    assert {line["policy"] for line in lines} == {"round_robin", "hybrid"}
    assert files["html"].stat().st_size > 10_000
    kept = (tmp_path / "sweep.yaml.results.jsonl").read_bytes()
    assert run("sweep", sheet, "--jobs", "1").status == 0
    assert (tmp_path / "sweep.yaml.results.jsonl").read_bytes() == kept


def test_a_sweep_writes_the_requests_of_each_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sheet, folder, table = tmp_path / "sweep.yaml", tmp_path / "requests", tmp_path / "s.csv"
    sheet.write_text(SWEEP.format(trace=trace(tmp_path)))
    assert run("sweep", sheet, "--jobs", "1", "--csv", table).status == 0
    plain = {line["key"]: line["report_hash"] for line in csv.DictReader(table.open(newline=""))}
    asked = ("sweep", sheet, "--jobs", "1", "--csv", table, "--requests-csv", folder)
    said = run(*asked)
    assert said.status == 0, said.err
    assert "4 runs, 1 at a time" in said.out, "those without a file are run again"
    assert f"{folder}: a file of requests for each of 4 runs\n" in said.out
    lines = list(csv.DictReader(table.open(newline="")))
    assert {line["key"]: line["report_hash"] for line in lines} == plain
    files = {folder / f"{line['policy']}-seed0-{line['key']}.csv": line for line in lines}
    assert files.keys() == set(folder.iterdir())
    for path, line in files.items():
        served = list(csv.DictReader(path.open(newline="")))
        assert len(served) == REQUESTS
        mean = sum(float(one["ttft_ms"]) for one in served) / REQUESTS
        assert float(line["ttft_ms.mean"]) == pytest.approx(mean, abs=0.01)

    gone = next(iter(files))
    gone.unlink()
    assert "1 runs, 1 at a time" in run(*asked).out
    assert gone.exists()

    monkeypatch.setattr("simulator.cli.sweeps.MAX_REQUEST_LINES", 4 * 10)
    gone.unlink()
    assert "4 have only the first 10 to end" in run(*asked).out
    assert len(gone.read_text().splitlines()) == 1 + 10


def test_a_sweep_refuses_more_request_files_than_its_limit(run: Run, tmp_path: Path) -> None:
    sheet, folder = tmp_path / "sweep.yaml", tmp_path / "requests"
    seeds = f", seeds: {list(range(251))}}}"
    sheet.write_text(SWEEP.format(trace=trace(tmp_path)).rstrip().removesuffix("}") + seeds)
    said = run("sweep", sheet, "--requests-csv", folder)
    assert said.status == 2
    assert "1,004 runs would write as many files, and 1,000 is the most" in said.err
    said = run("sweep", sheet, "--requests-csv", folder, "--dask", "tcp://127.0.0.1:1")
    assert said.status == 2
    assert "--requests-csv is written where runs are" in said.err
    assert not folder.exists()


def test_hits_prints_and_writes_its_result(run: Run, tmp_path: Path) -> None:
    found = tmp_path / "hits.json"
    said = run("hits", trace(tmp_path), "--kv-tokens", "inf", "--workers", "2", "--json", found)
    assert said.status == 0, said.err
    rows = {row["rule"]: row for row in json.loads(found.read_text())}
    # Three families share two blocks: all but each family's first request find 1,024 tokens.
    share = (REQUESTS - 3) * 1024 / (REQUESTS * 1300)
    assert rows["single_lru"]["hit_rate_tokens"] == pytest.approx(share, abs=1e-4)
    assert f"{share:.4f}" in said.out


def test_bound_prints_and_writes_its_result(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    said = run("bound", trace(tmp_path), *FLEET, "--policy", "hybrid", "--json", file)
    assert said.status == 0, said.err
    assert "no policy is better than" in said.out
    assert json.loads(file.read_text())["distances"][1]["policy"] == "hybrid"


def test_sources_lists_every_format_and_generator(run: Run) -> None:
    said = run("sources")
    assert said.status == 0
    for one in (*FORMATS, *GENERATORS):
        assert f"\n  {one.name} " in said.out


def test_every_command_has_help_that_fits_the_terminal(run: Run) -> None:
    commands = re.findall(r"'([a-z-]+)'", run("nonsense").err.partition("choose from")[2])
    assert {"replay", "study", "stack"} <= set(commands)
    for command in commands:
        said = run(command, "--help")
        assert said.status == 0
        assert said.out.startswith(f"usage: warmroute-sim {command.removeprefix('run-')} ")
        assert not re.search(r"%\(|(?<![\d ])%", said.out), "nothing is left to be filled in"
        assert "%%" not in said.out
        assert len(said.out.partition("\n\n")[0]) < 120, "a usage line, not a list of all options"


def test_check_facts_distinguishes_good_changed_and_damaged_recordings(
    run: Run, tmp_path: Path
) -> None:
    desk = RecordedDispatcher(tmp_path / "facts")
    for worker_id in range(3):
        desk.join(worker_id)
    desk.events(1, 0, stored([1, 2, 3]))
    desk.arrive(0, [1, 2, 3])
    desk.played()
    good = run("check-facts", desk.path)
    assert good.status == 0
    assert good.out == (
        "5 facts played, 1 answers compared, 0 differ (the recording ends: the router ended)\n"
    )

    kept = list(records(desk.path))
    kept[4][2]["worker_id"] = 2  # another worker stored the blocks
    desk.path.write_bytes(b"".join(map(framed, kept)))
    changed = run("check-facts", desk.path)
    assert changed.status == 1
    assert "1 fact 4 (Arrival at 1000.000000 s): recorded [['Dispatch'" in changed.out
    assert "1 differ" in changed.out

    data = desk.path.read_bytes()
    desk.path.write_bytes(data[:-9])
    cut = run("check-facts", desk.path)
    assert "(the recording ends: cut off)" in cut.out

    desk.path.write_bytes(data[:8] + b"\xc1" * 40 + data[48:])
    damaged = run("check-facts", desk.path)
    assert damaged.status == 2
    assert f"{desk.path}: record 0 is no msgpack" in damaged.err
