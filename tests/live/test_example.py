"""Tests that the policy and the wrapper in CONTRIBUTING.md run as the page says, in the simulator
and the router.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live.stack import running
from tests.told_decision import decision_in

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "simulator" / "data" / "conversation_sample.jsonl.gz"
MODULE = "my_routing"


def blocks(language: str) -> list[str]:
    """Return the code blocks of CONTRIBUTING.md in this language."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def spec(tmp_path: Path) -> str:
    """Write the example's module to `tmp_path` and return the policy's specification."""
    (code,) = (block for block in blocks("python") if "def thrifty" in block)
    assert len(code.splitlines()) <= 10
    (tmp_path / f"{MODULE}.py").write_text(code)
    (commands,) = (block for block in blocks("sh") if MODULE in block)
    (found,) = re.findall(r"^SPEC='(.*)'$", commands, re.MULTILINE)
    return str(found)


def test_the_contributing_guides_policy_runs_in_the_simulator(spec: str, tmp_path: Path) -> None:
    replay = [sys.executable, "-m", "simulator", "replay", str(TRACE), "--requests", "100"]
    done = subprocess.run(
        [*replay, "--policy", "hybrid", "--policy", spec, "--json", "out.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{MODULE}:thrifty|{MODULE}:spare_the_newest" in done.stdout
    report = (tmp_path / "out.json").read_text()
    assert re.search(rf'"{MODULE}:spare_the_newest.extra_tokens": ?500.0', report)


async def test_the_contributing_guides_policy_runs_in_the_router(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with running(tmp_path, workers=2, router=["--policy", spec]) as stack:
        headers = {"x-warmroute-explain": "1"}
        workers = set()
        for number in range(6):
            body = {"model": "tiny", "prompt": [number] * 64, "max_tokens": 1}
            url = f"{stack.url}/v1/completions"
            async with stack.http.post(url, json=body, headers=headers) as reply:
                assert reply.status == 200, await reply.text()
                why = decision_in(reply.headers["x-warmroute-explain"])
            assert why["policy"] == f"{MODULE}:thrifty|{MODULE}:spare_the_newest"
            assert why["reason"] == "policy"
            workers.add(why["worker"])
        assert len(workers) == 1, "idle workers: the newest is spared each time"
        await stack.assert_idle()
