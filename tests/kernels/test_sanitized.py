"""Random histories against the C++ core, built with the address and UB sanitizers."""

import subprocess
from pathlib import Path


def test_histories_run_clean(sanitized_replay: Path) -> None:
    done = subprocess.run(["sh", str(sanitized_replay)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as the model says" in done.stdout
