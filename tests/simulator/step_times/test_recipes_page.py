"""Tests of docs/recipes.md: its memory figures are what `profile` prints, and its lines are valid
configurations.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from router.cli.main import main as router
from simulator.cli.command_line import main as simulator
from tests.simulator.step_times.configs import CONFIGS, written
from tests.tokenizer_folder import write_model

PAGE = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"^\| ([\w.-]+(?: 3 27B)?) \| ([\d,]*\d)(?:[, ][^|]*)? \| (\w+) (\w+) \| ([\d,]+) \|$", re.M
)
NAMES = {"gemma-3-27b": "Gemma 3 27B"}
COUNTS = {"one": "1", "two": "2", "eight": "8"}


def test_the_memory_on_the_page_is_that_printed_by_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    names = {NAMES.get(name, name).lower(): name for name in CONFIGS}
    rows = ROW.findall(PAGE)
    assert len(rows) == 7
    for model, token_bytes, count, gpu, tokens in rows:
        file = written(tmp_path, CONFIGS[names[model.lower()]])
        assert simulator(["profile", str(file), "--gpu", gpu.lower(), "--tp", COUNTS[count]]) == 0
        assert f"KV: {tokens} tokens of {token_bytes} bytes" in capsys.readouterr().out, model


def test_each_command_on_the_page_is_a_valid_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = str(write_model(tmp_path))
    blocks = re.findall(r"^```sh\nwarmroute serve (.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 9
    for block in blocks:
        flags = shlex.split(block.replace("\\\n", " ").replace("/models/MODEL", model))
        assert router(["config", *flags]) == 0, capsys.readouterr().err
        assert "2 workers" in capsys.readouterr().out
