"""Tests of `warmroute-sim replay` on good input: every format, every report, one process or
several.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from router.settings.schema import Config
from simulator.cli.setups import POLICIES
from simulator.cli.truth import VALIDATED
from simulator.live.demo import acts
from simulator.report.figures import figure
from tests.simulator.cli_support import (
    FLEET,
    FORMATS,
    REQUESTS,
    Run,
    lines_of,
    mooncake,
    report,
    run,
    trace,
)
from tests.simulator.trace_lines import write

__all__ = ["run"]
FAULTS = """\
- {at_s: 0.1, do: slow, worker: 0, factor: 2}
- {at_s: 0.2, do: clear, worker: 1}
- {at_s: 0.2, do: lose_events, worker: 1, for_s: 0.1}
- {at_s: 0.3, do: join, group: 0}
- {at_s: 0.4, do: die, worker: 0}
- {at_s: 0.5, do: hang, worker: 1, for_s: 0.2}
- {at_s: 0.8, do: restart, worker: 0}
- {at_s: 0.9, do: drain, worker: 2}
"""


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_recognized_and_replayed(run: Run, tmp_path: Path, name: str) -> None:
    found = tmp_path / "r.json"
    said = run("replay", trace(tmp_path, name), *FLEET, "--policy", "hybrid", "--json", found)
    assert said.status == 0, said.err
    assert f"{REQUESTS} requests, 2 workers" in said.out
    assert f"trace ({name})" in said.out
    (row,) = report(found)
    unshared = ("azure", "burstgpt", "access_log")
    assert row["requests"] == row["completed"] == REQUESTS
    assert bool(row["hit_rate_tokens"]) == (name not in unshared), "what is shared"
    named = run("replay", tmp_path / "trace", *FLEET, "--policy", "hybrid", "--format", name)
    assert named.out == said.out


@pytest.mark.parametrize("packed", ["gzip", "zstd"])
def test_a_compressed_file_gives_the_same_output(run: Run, tmp_path: Path, packed: str) -> None:
    plain = run("replay", trace(tmp_path), *FLEET)
    assert run("replay", trace(tmp_path, packed=packed), *FLEET) == plain


def test_json_csv_and_html_reports_have_the_same_figures(run: Run, tmp_path: Path) -> None:
    files = {name: tmp_path / f"r.{name}" for name in ("json", "csv", "html")}
    wanted = [text for name, path in files.items() for text in (f"--{name}", path)]
    said = run("replay", trace(tmp_path), *FLEET, "--policy", "hybrid", "--seed", "7", *wanted)
    assert said.status == 0, said.err
    (row,) = report(files["json"])
    with files["csv"].open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == row["requests"] == REQUESTS
    assert Counter(line["verdict"] for line in lines) == {"completed": row["completed"]}
    assert row["ttft_ms"]["mean"] == pytest.approx(
        sum(float(line["ttft_ms"]) for line in lines) / REQUESTS, abs=0.01
    )
    hits = sum(int(line["hit_tokens"]) for line in lines)
    assert row["hit_rate_tokens"] == pytest.approx(hits / row["input_tokens"], abs=1e-5)
    sent = Counter(int(line["worker"]) for line in lines)
    assert row["requests_per_worker"] == [sent[0], sent[1]]
    assert row["seed"] == 7
    shown = figure("ttft_ms.mean").show(row["ttft_ms"]["mean"])
    assert re.search(rf"hybrid +{re.escape(shown)} ", said.out)
    page = files["html"].read_text()
    assert f"{row['hit_rate_tokens']:.1%}" in page
    assert "<img" in page


@pytest.mark.full  # test_sweep_replay compares the runs behind the command
def test_the_number_of_processes_changes_no_figure(run: Run, tmp_path: Path) -> None:
    path = trace(tmp_path)
    asked = (*FLEET, "--policy", "random", "--policy", "hybrid", "--seed", "1", "--seed", "2")
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    page = tmp_path / "two.html"
    alone = run("replay", path, *asked, "--json", one)
    both = run("replay", path, *asked, "--jobs", "2", "--json", two, "--html", page)
    assert (alone.status, both.status) == (0, 0), both.err
    assert [row["report_hash"] for row in report(one)] == [r["report_hash"] for r in report(two)]
    assert len({row["report_hash"] for row in report(one)}) == 4
    assert "4 of 4: " in both.out
    assert both.out.endswith(alone.out), "the same table below what tells of progress"
    assert page.stat().st_size > 10_000


def test_the_same_seed_gives_the_same_result_and_another_seed_does_not(
    run: Run, tmp_path: Path
) -> None:
    path, found = trace(tmp_path), tmp_path / "r.json"
    hashes = []
    for seed in (3, 3, 4):
        run("replay", path, *FLEET, "--policy", "random", "--seed", seed, "--json", found)
        hashes.append(report(found)[0]["report_hash"])
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_can_be_resampled(run: Run, tmp_path: Path, name: str) -> None:
    found = tmp_path / "r.json"
    asked = (*FLEET, "--policy", "least_requests", "--policy", "hybrid", "--json", found)
    said = run("replay", trace(tmp_path, name), *asked, "--resamples", "3", "--seed", "5")
    assert said.status == 0, said.err
    rows = report(found)
    assert [row["seed"] for row in rows] == [5, 6, 7] * 2
    for one, other in zip(rows[:3], rows[3:], strict=True):
        assert one["requests"] == other["requests"] == one["completed"]
        assert one["input_tokens"] == other["input_tokens"], "every policy has the same draws"
    # Draws from a table of times and lengths alone may differ in their times only.
    assert len({row["report_hash"] for row in rows}) == 6
    assert "its sessions drawn anew with each seed" in said.out
    assert "the same 3 seeds, paired with least_requests; 95 % intervals" in said.out
    about = json.loads(found.read_text())["about"]
    assert all(setup["workload"]["resample"] is True for setup in about["setups"])
    one = run("replay", trace(tmp_path, name), *asked, "--resample", "--seed", "6")
    assert one.status == 0, one.err
    assert report(found)[0]["report_hash"] == rows[1]["report_hash"], "a draw by itself"


def test_resamples_of_a_generator_are_its_seeds(run: Run, tmp_path: Path) -> None:
    source = "gen:sglang?groups=3&prompts=4&system=64&question=16&output=4"
    files = [tmp_path / "draws.json", tmp_path / "seeds.json"]
    asked = ("replay", source, *FLEET, "--policy", "hybrid")
    assert run(*asked, "--resamples", "2", "--json", files[0]).status == 0
    assert run(*asked, "--seed", "0", "--seed", "1", "--json", files[1]).status == 0
    told = [[row["report_hash"] for row in report(file)] for file in files]
    assert told[0] == told[1]
    refused = run(*asked, "--resample")
    assert refused.status == 2
    assert "makes other requests with every seed already" in refused.err


def test_several_seeds_of_a_recording_give_a_hint_to_resample(run: Run, tmp_path: Path) -> None:
    asked = ("replay", trace(tmp_path), *FLEET, "--policy", "hybrid", "--seed", "0")
    hint = "--resamples N replays N draws of its sessions"
    found = tmp_path / "r.json"
    assert hint not in run(*asked, "--json", found).out
    about = json.loads(found.read_text())["about"]
    assert "resample" not in about["setups"][0]["workload"], "set-ups that were kept stay the same"
    assert hint in run(*asked, "--seed", "1").out
    assert hint not in run(*asked, "--seed", "1", "--resample").out


def test_closed_loops_mixed_pools_and_faults_can_be_combined(run: Run, tmp_path: Path) -> None:
    faults = tmp_path / "faults.yaml"
    faults.write_text(FAULTS)
    found = tmp_path / "r.json"
    group = "count={},profile=qwen3-32b-h100-tp2,kv_tokens=20k,speed=4"
    said = run(
        *("replay", trace(tmp_path, "requests"), "--closed-loop", "--faults", faults),
        *("--group", group.format(1), "--group", group.format(1) + ",max_requests=9"),
        *("--policy", "hybrid", "--json", found),
    )
    assert said.status == 0, said.err
    (row,) = report(found)
    assert len(row["workers"]) == 3, "one joined"
    assert row["completed"] + row["failed"] == REQUESTS
    assert said.out.splitlines()[0].startswith(f"{REQUESTS} requests, 3 workers")


def test_the_routers_default_policy_is_among_those_compared(run: Run, tmp_path: Path) -> None:
    found = tmp_path / "r.json"
    assert run("replay", trace(tmp_path), *FLEET, "--json", found).status == 0
    policies = [row["policy"] for row in report(found)]
    assert policies == list(POLICIES)
    for compared in (policies, VALIDATED, *(act.policies for act in acts())):
        assert Config().policy in compared


def test_a_replay_of_one_request_works(run: Run, tmp_path: Path) -> None:
    said = run("replay", trace(tmp_path), *FLEET, "--requests", "1")
    assert said.status == 0
    assert said.out.startswith("1 request, 2 workers")


def test_a_generator_needs_no_file(run: Run, tmp_path: Path) -> None:
    found = tmp_path / "r.json"
    source = "gen:sglang?groups=3&prompts=4&system=64&question=16&output=4"
    said = run("replay", source, *FLEET, "--policy", "hybrid", "--json", found)
    assert said.status == 0, said.err
    assert report(found)[0]["requests"] == 12


def test_a_request_too_large_for_any_worker_is_rejected_and_reported(
    run: Run, tmp_path: Path
) -> None:
    large = mooncake(50, input_length=20_480, hash_ids=list(range(5000, 5040)))
    path = write(tmp_path, *lines_of("mooncake"), large).source
    said = run("replay", path, *FLEET, "--kv-tokens", "8k", "--policy", "hybrid")
    assert said.status == 0
    assert "hybrid turned away: kv_capacity 1" in said.out


@pytest.mark.parametrize(("large", "status"), [(REQUESTS, 0), (REQUESTS + 1, 1)])
def test_a_replay_fails_with_the_reason_if_most_requests_are_rejected(
    run: Run, tmp_path: Path, large: int, status: int
) -> None:
    ids = list(range(5000, 5040))
    lines = [mooncake(50 + n, input_length=20_480, hash_ids=ids) for n in range(large)]
    path = write(tmp_path, *lines_of("mooncake"), *lines).source
    asked = (*FLEET, "--kv-tokens", "8k", "--policy", "hybrid", "--policy", "round_robin")
    said = run("replay", path, *asked, "--seed", "1", "--seed", "2")
    assert said.status == status, said.err
    told = [line for line in said.out.splitlines() if line.startswith("failed: ")]
    assert told == status * [
        f"failed: {policy}, seed {seed}: {large} of {REQUESTS + large} requests had no whole "
        f"answer (kv_capacity {large}), and its other figures are of the rest only; give it more "
        "--kv-tokens"
        for policy in ("hybrid", "round_robin")
        for seed in (1, 2)
    ]


def test_requests_are_held_for_the_routers_default_time_or_the_given_one(
    run: Run, tmp_path: Path
) -> None:
    path, found = trace(tmp_path), tmp_path / "r.json"
    asked = (*FLEET, "--speed", "3", "--json", found)
    asked = (*asked, "--policy", "tests.simulator.replays:at_most_two")
    rows = {}
    for hold_s in (None, Config().limits.hold_s, 0.3, 0):
        said = run("replay", path, *asked, *(() if hold_s is None else ("--hold-s", hold_s)))
        rows[hold_s] = row = report(found)[0]
        assert said.status == int(2 * row["completed"] < row["requests"]), said.err
    assert rows[None]["report_hash"] == rows[Config().limits.hold_s]["report_hash"]
    assert rows[None]["rejected"] == 0
    assert 0 < rows[0.3]["rejections"]["hold_timeout"] < rows[0]["rejections"]["hold_timeout"]
    assert rows[None]["waits"]["max_ms"] > rows[0.3]["waits"]["max_ms"] > 300
    assert rows[0]["waits"]["max_ms"] <= 100, "until the router looks again"


def test_network_and_event_flags_change_the_simulated_world(run: Run, tmp_path: Path) -> None:
    path, found = trace(tmp_path), tmp_path / "r.json"
    means = []
    for more in ((), ("--network-ms", "20"), ("--no-events", "--report-every-ms", "0")):
        said = run("replay", path, *FLEET, "--policy", "round_robin", "--json", found, *more)
        assert said.status == 0, said.err
        means.append(report(found)[0]["ttft_ms"]["mean"])
    assert means[1] == pytest.approx(means[0] + 2 * 19.5, abs=5), "there and back"
    assert means[2] == means[0], "round robin asks for no news"
