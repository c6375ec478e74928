"""Tests of `warmroute-engine serve` before it serves: it refuses wrong arguments in one line with
an exit code.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import aiohttp
import pytest

from engine.cli import main as cli
from engine.model.tiny import make_tiny
from engine.runner.runner import MAX_FAILED_STEPS


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--threads", "0"], "--threads"),
        (["--max-model-len", "0"], "--max-model-len must be 1.."),
        (["--max-num-tokens", "8"], "max_num_tokens"),
        (["--kv-cache-free-gpu-mem-fraction", "0"], "kv_cache_free_gpu_mem_fraction"),
        (["--max-tokens-in-paged-kv-cache", "3"], "one block of 16"),
        (["--dtype", "int3"], "--dtype"),
    ],
)
def test_bad_flags_are_rejected(
    tmp_path: Path, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", str(tmp_path), *flags])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-tokens-in-paged-kv-cache", "64"], "raise max_tokens_in_paged_kv_cache to 1280"),
        (["--max-model-len", "5000"], "exceeds the 2048 positions"),
        (
            ["--max-model-len", "2000", "--max-tokens-in-paged-kv-cache", "1600"],
            "max_model_len needs 2000",
        ),
        (["--device", "tpu"], "device tpu is none that is served; say cpu"),
        (["--device", "meta"], "device meta is none that is served; say cpu"),
        (["--device", "cuda:99"], "device cuda:99: 100 GPUs are asked for and torch finds"),
    ],
)
def test_settings_that_the_machine_cannot_serve_are_rejected(
    tmp_path: Path, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny(tmp_path)
    assert cli.main(["serve", str(tmp_path), *flags]) == 1
    assert says in capsys.readouterr().err


def test_a_folder_with_a_missing_or_incomplete_model_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err
    make_tiny(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert cli.main(["serve", str(tmp_path)]) == 1
    assert "tokenizer.json" in capsys.readouterr().err
    (tmp_path / "tokenizer.json").write_text("{")
    assert cli.main(["serve", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "tokenizer.json" in said
    assert "; copy its tokenizer" in said
    (tmp_path / "half").mkdir()
    make_tiny(tmp_path / "half")
    (tmp_path / "half" / "chat_template.jinja").write_text("{% for x in %}")
    assert cli.main(["serve", str(tmp_path / "half")]) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path / 'half'}: chat template, line 1" in said


FAILING = """
import sys
from engine.cli import main as cli
from engine.runner.load import Computing

def fail(self, batch):
    raise RuntimeError("the device is gone, say")

Computing.logits = fail
sys.exit(cli.main(sys.argv[1:]))
"""


async def test_consecutive_failed_steps_end_the_program_with_exit_code_3(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", FAILING, "serve", str(tmp_path), "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert program.stdout is not None
    ready = (await program.stdout.readline()).decode().split()
    body = {"prompt": [1, 2], "max_tokens": 2}
    async with aiohttp.ClientSession() as http:
        for _ in range(MAX_FAILED_STEPS):
            async with http.post(f"{ready[1]}/v1/completions", json=body) as reply:
                assert reply.status == 500
    _, said = await program.communicate()
    assert program.returncode == 3
    assert b"3 steps failed in a row" in said.splitlines()[-1]
