"""Hostile KV events against the native code, built with libFuzzer, ASan and UBSan."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.effort import EFFORT
from tests.kernels.event_vectors import vectors

SCRIPT = Path(__file__).parents[2] / "kernels" / "tests" / "fuzz.sh"


@pytest.fixture(scope="module")
def clang(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A clang that has libFuzzer: Debian packages it apart."""
    if shutil.which("clang++") is None:
        pytest.skip("clang++ is not installed: the fuzzer of KV events cannot be built")
    probe = tmp_path_factory.mktemp("probe") / "probe"
    source = 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }'
    command = ["clang++", "-fsanitize=fuzzer,address", "-x", "c++", "-", "-o", str(probe)]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(
            "clang++ has no libFuzzer (Debian: libclang-rt-14-dev): no fuzzing of KV events"
        )


@pytest.mark.timeout(1200)
def test_hostile_events(clang: None, tmp_path: Path) -> None:
    """A fixed number of inputs, begun with what engines send."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, vector in vectors().items():
        (corpus / name).write_bytes(vector.payload)
    command = ["sh", str(SCRIPT), "-seed=1", f"-runs={40_000 * EFFORT}", str(corpus)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Done" in done.stderr
