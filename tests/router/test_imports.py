"""Tests of the modules that a program imports at its start: none that only some of its
users need.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.calibrate.fit import COLUMNS

OPTIONAL = {"redis", "hiredis", "opentelemetry", "kubernetes_asyncio", "tokenizers", "jinja2"}
NEVER = {"torch", "scipy", "matplotlib"}


def run_python(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("module", "left_out"), [("router.cli.serve", OPTIONAL | NEVER), ("simulator.cli", NEVER)]
)
def test_a_program_starts_without_unneeded_modules(module: str, left_out: set[str]) -> None:
    imported = set(run_python(f"import sys, {module}; print(*sys.modules)").stdout.split())
    assert module in imported
    assert imported.isdisjoint(left_out)


def test_the_error_for_a_missing_library_contains_the_extra(tmp_path: Path) -> None:
    """A command whose library is missing names the extra to install: `make demo` installs no scipy,
    which `calibrate` needs.
    """
    draw, log = random.Random(0), tmp_path / "steps.csv"
    rows = [[draw.randrange(1, 999) for _ in COLUMNS[:-1]] + [0.01] for _ in range(50)]
    lines = [COLUMNS, *rows]
    log.write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    code = (
        "import sys; sys.modules.update({'scipy': None, 'scipy.optimize': None})\n"
        "from simulator.cli import main; sys.exit(main(['calibrate', *sys.argv[1:]]))"
    )
    ended = run_python(code, log, "--kv-tokens", "269k")
    assert ended.returncode == 1
    assert ended.stderr == (
        "warmroute-sim: scipy is not installed: pip install 'scipy>=1.17' (or '.[sim]' in the "
        "checkout)\n"
    )
