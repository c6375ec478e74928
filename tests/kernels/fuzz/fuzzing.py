"""Runs the native code, built with libFuzzer, ASan and UBSan, on hostile inputs."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "kernels" / "tests" / "fuzz.sh"


def need_clang(folder: Path) -> None:
    """Skip the test if clang or libFuzzer is missing, and say which. Debian packages libFuzzer
    apart from its clang.
    """
    if shutil.which("clang++") is None:
        pytest.skip("clang++ is not installed: no fuzzer can be built")
    source = 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }'
    probe = str(folder / "probe")
    command = ["clang++", "-fsanitize=fuzzer,address", "-x", "c++", "-", "-o", probe]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("clang++ has no libFuzzer (Debian: libclang-rt-14-dev): no fuzzing")


def fuzz(target: str, seeds: dict[str, bytes], folder: Path, runs: int) -> None:
    """Run `runs` inputs for `target` of the script, starting from `seeds`; they are the same each
    time.
    """
    corpus = folder / "corpus"
    corpus.mkdir()
    for name, seed in seeds.items():
        (corpus / name).write_bytes(seed)
    command = ["sh", str(SCRIPT), target, "-seed=1", f"-runs={runs}", str(corpus)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Done" in done.stderr
