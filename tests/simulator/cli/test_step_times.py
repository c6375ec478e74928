"""Tests of the command `profile`: it makes a file that replays take from a config.json, or says
what is wrong.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.profiles import read_profile
from tests.simulator.cli_support import Run, report, run, trace
from tests.simulator.step_times.configs import CONFIGS, written

__all__ = ["run"]


def test_a_model_config_becomes_a_profile_that_replay_accepts(run: Run, tmp_path: Path) -> None:
    config = written(tmp_path, CONFIGS["qwen3-32b"])
    out = tmp_path / "mine-tp2.json"
    said = run("profile", config, "--gpu", "h100", "--tp", "2", "--out", out)
    assert said.status == 0
    for text in (
        "linear_s",
        "32.8 billion",
        "65.5 GB",
        "expected error, CPU",
        "assumed: KV may have",
    ):
        assert text in said.out
    assert "prefill of 8,192" in said.out
    assert f"use it as --profile {out}" in said.out
    assert "in the file's name" not in said.out
    kept = read_profile(out)
    assert kept.name == "mine-tp2"
    assert kept.step_time.prefill_s(8192) == pytest.approx(0.48, rel=0.1)
    rows = tmp_path / "rows.json"
    replayed = run("replay", trace(tmp_path), "--workers", "2", "--profile", out, "--json", rows)
    assert replayed.status == 0
    assert report(rows)


def test_a_profiles_name_comes_from_its_folder_or_the_flag(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "Llama 3.1-8B"
    folder.mkdir()
    written(folder, CONFIGS["llama-3.1-8b"])
    assert "llama-3.1-8b-a100-tp4" in run("profile", folder, "--gpu", "a100", "--tp", "4").out
    assert "mine" in run("profile", folder, "--gpu", "a100", "--name", "mine").out
    out = tmp_path / "mine.json"
    said = run("profile", folder, "--gpu", "a100", "--tp", "4", "--out", out).out
    assert "name it like mine-tp4.json" in said


def test_weight_and_kv_formats_can_be_given(run: Run, tmp_path: Path) -> None:
    config = written(tmp_path, CONFIGS["qwen3-30b-a3b"])
    said = run("profile", config, "--gpu", "b200", "--weights", "nvfp4", "--kv", "fp8").out
    assert "nvfp4 as --weights says" in said
    assert "49,152 bytes (fp8)" in said
    assert "48 of experts" in said


WRONG = {
    "no GPU": ((), "--gpu"),
    "an unknown GPU": (("--gpu", "h900"), "h900"),
    "an unknown format": (("--gpu", "h100", "--weights", "fp3"), "fp3"),
    "too few GPUs": (("--gpu", "a100", "--tp", "1"), "4 GPUs would do"),
    "heads that do not split": (("--gpu", "h100", "--tp", "6"), "valid: 1, 2, 4, 8"),
    "no experts": (("--gpu", "h100", "--tp", "4", "--ep"), "no experts"),
    "another kind of file": (("--gpu", "h100", "--tp", "4", "--out", "x.yaml"), "ends in .json"),
    "nowhere to write": (("--gpu", "h100", "--tp", "4", "--out", "/no/x.json"), "no folder"),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_wrong_flags_are_reported(run: Run, tmp_path: Path, name: str) -> None:
    flags, mark = WRONG[name]
    said = run("profile", written(tmp_path, CONFIGS["llama-3.1-70b"]), *flags)
    assert said.status == 2
    assert mark in said.err


def test_the_error_for_a_bad_config_names_file_and_field(run: Run, tmp_path: Path) -> None:
    config = written(tmp_path, {**CONFIGS["llama-3.1-8b"], "num_attention_heads": 0})
    said = run("profile", config, "--gpu", "h100")
    assert said.status == 2
    assert f"{config}: num_attention_heads: 0" in said.err


def test_a_config_is_not_overwritten(run: Run, tmp_path: Path) -> None:
    config = written(tmp_path, CONFIGS["llama-3.1-8b"])
    text = config.read_bytes()
    for named in (config, tmp_path):
        said = run("profile", named, "--gpu", "h100", "--out", config)
        assert said.status == 2
        assert "name another file" in said.err
    assert config.read_bytes() == text
