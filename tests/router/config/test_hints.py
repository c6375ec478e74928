"""Tests of the hint "did you mean" for misspelt flags, commands and paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.cli.main import main as router
from router.config.paths import near_path
from simulator.cli import main as simulator


def error_output(program, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        status = program(arguments)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["srve"], "invalid choice: 'srve'"),
        (["srve"], " (did you mean serve?); see warmroute --help"),
        (["workers", "lst"], " (did you mean list?); see warmroute workers --help"),
        (["workers", "list", "--admn", "x"], "--admn x (did you mean --admin?); see warmroute wor"),
        (["serve", "--prot=1"], "--prot=1 (did you mean --port?); see warmroute serve --help"),
        (["serve", "--hepl"], " (did you mean --help?)"),
        (["serve", "http://h:1"], " (did you mean --worker http://h:1?)"),
        (["serve", "--log-level", "inf"], " (did you mean info?); allowed: debug, info"),
        (["serve", "--policy", "hybird"], " (did you mean hybrid?); valid: "),
        (["serve", "--policy", "hybrid?max_request=1"], " (did you mean max_requests?); valid: "),
        (["serve", "--worker", "http://h:1,kind=vlm"], " (did you mean vllm?); allowed: "),
    ],
)
def test_the_router_suggests_the_nearest_word(arguments, hint, capsys):
    assert hint in error_output(router, arguments, capsys)


@pytest.mark.parametrize("arguments", [["zzzz"], ["serve", "--zzzz", "1"], ["serve", "zzzz"]])
def test_no_word_is_suggested_if_none_is_near(arguments, capsys):
    assert "did you mean" not in error_output(router, arguments, capsys)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["relay"], " (did you mean replay?)"),
        (["replay", "t", "--polcy", "x"], " (did you mean --policy?)"),
        (["replay", "t", "--policy", "hybird"], " (did you mean hybrid?)"),
        (["replay", "simulator/data/conversation_sampl.jsonl.gz"], "conversation_sample.jsonl.gz?"),
    ],
)
def test_the_simulator_suggests_the_nearest_word(arguments, hint, capsys):
    assert hint in error_output(simulator, arguments, capsys)


def test_the_error_for_a_missing_path_suggests_the_nearest_existing_one(tmp_path, capsys):
    (tmp_path / "models" / "llama").mkdir(parents=True)
    (tmp_path / "router.yaml").write_text("port: 1\n")
    for wrong, right in (
        ("ruoter.yaml", "router.yaml"),
        ("modles/llama", "models/llama"),
        ("models/lama", "models/llama"),
        ("modles/other", "models"),
    ):
        assert near_path(tmp_path / wrong) == f" (did you mean {tmp_path / right}?)"
    for path in ("router.yaml", "zzz", "zzz/zzz", "router.yaml/x", "models/zzz"):
        assert near_path(tmp_path / path) == ""
    assert near_path(Path("/")) == near_path(Path()) == near_path(Path("x" * 5_000)) == ""
    assert " (did you mean" in error_output(
        router, ["config", "--check", f"{tmp_path}/rooter.yml"], capsys
    )
    tokenizer = ["serve", "--tokenizer", f"{tmp_path}/model"]
    assert f"(did you mean {tmp_path}/models?)" in error_output(router, tokenizer, capsys)
