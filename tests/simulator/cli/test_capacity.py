"""Tests of `rate-match` and `pareto`: what they print and write, and what they refuse."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.simulator.cli_support import Run, run, trace

__all__ = ["run"]
SHAPES = ("--profile", "qwen3-32b-h100-tp2", "--profile", "qwen3-32b-h100-tp4")


def test_rate_match_prints_and_writes_its_result(run: Run, tmp_path: Path) -> None:
    found = tmp_path / "match.json"
    said = run(
        *("rate-match", trace(tmp_path), "--tpot-ms", 20, "--ttft-ms", 2000, "--gpus", 16),
        *(*SHAPES, "--json", found),
    )
    assert said.status == 0, said.err
    assert "as the caches of 4 workers would have it" in said.out
    assert "requests per second are" in said.out
    kept = json.loads(found.read_text())
    assert 0 < kept["mix"]["uncached_tokens"] < kept["mix"]["prompt_tokens"]
    split = kept["pools"]["split"]
    assert {part["role"] for part in split["parts"]} == {"prefill", "decode"}
    gpus = sum(part["workers"] * part["shape"]["gpus"] for part in split["parts"])
    assert gpus <= 16


def test_fewer_cached_tokens_need_more_prefill_workers(run: Run, tmp_path: Path) -> None:
    def ratio(*more: object) -> float:
        out = tmp_path / "match.json"
        said = run("rate-match", trace(tmp_path), "--tpot-ms", 25, *more, "--json", out)
        assert said.status == 0, said.err
        parts = json.loads(out.read_text())["pools"]["split"]["parts"]
        return float(parts[0]["workers"] / parts[1]["workers"])

    assert ratio("--cached", "none") > 1.5 * ratio()


def test_the_command_of_each_pareto_point_reproduces_the_point(run: Run, tmp_path: Path) -> None:
    found, picture = tmp_path / "front.json", tmp_path / "front.svg"
    said = run(
        *("pareto", trace(tmp_path), "--ttft-ms", 3000, "--points", 6, *SHAPES),
        *("--gpus", 24, "--json", found, "--svg", picture),
    )
    assert said.status == 0, said.err
    assert picture.read_text().count("<svg") == 1
    points = json.loads(found.read_text())["points"]
    assert {one["kind"] for one in points} == {"split", "aggregated"}
    for one in points:
        program, *words = shlex.split(one["command"])
        again = tmp_path / "again.json"
        assert program == "warmroute-sim"
        assert one["command"] in said.out
        assert run(*words, "--json", again).status == 0
        pools = json.loads(again.read_text())["pools"]
        pool = pools["split" if one["kind"] == "split" else "alone"]
        assert pool["requests_per_s"] == pytest.approx(one["pool"]["requests_per_s"], rel=1e-3)


def test_unreachable_targets_exit_with_1(run: Run, tmp_path: Path) -> None:
    said = run("rate-match", trace(tmp_path), "--tpot-ms", 1, "--gpus", 16)
    assert said.status == 1
    assert "cannot keep the targets" in said.out
    assert "raise --tpot-ms" in said.out
    said = run("pareto", trace(tmp_path), "--ttft-ms", 1)
    assert said.status == 1
    assert "raise --ttft-ms" in said.out


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--profile", "gpt-9"), "valid ones"),
        (("--decode-profile", "llama-3.1-8b-h100"), "not one model"),
        (("--cached", "log"), "leave out --cached"),
        (("--link-gbps", "0"), "not a number above 0"),
        (("--gpus", "9999"), "4096 at most"),
        (("--tpot-ms", "-1"), "not a number above 0"),
    ],
)
def test_the_error_for_wrong_usage_names_the_remedy(
    run: Run, tmp_path: Path, more: tuple[str, ...], told: str
) -> None:
    said = run("rate-match", trace(tmp_path), "--tpot-ms", 25, *more)
    assert said.status == 2
    assert told in said.err


def test_rate_match_simulate_checks_the_result_by_replays(run: Run, tmp_path: Path) -> None:
    found = tmp_path / "match.json"
    said = run(
        *("rate-match", trace(tmp_path), "--tpot-ms", 25, "--ttft-ms", 2000, "--gpus", 12),
        *("--simulate", "--json", found),
    )
    assert said.status == 0, said.err
    assert "prefill, " in said.out
    assert "do both" in said.out
    trials = json.loads(found.read_text())["trials"]
    assert len(trials) >= 3
    assert all(0 <= one["good_share"] <= 1 for one in trials)
    said = run("rate-match", trace(tmp_path), "--tpot-ms", 25, "--simulate")
    assert said.status == 2
    assert "say on how many --gpus" in said.err
