"""Random histories against the C++ core, built with the address and UB sanitizers."""

import subprocess
from pathlib import Path

import pytest
import xxhash

from tests.effort import EFFORT

pytestmark = pytest.mark.timeout(1200)  # the first to come builds what it runs


def test_histories_run_clean(sanitized_replay: Path) -> None:
    done = subprocess.run(["sh", str(sanitized_replay)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as the model says" in done.stdout


def test_lives_of_virtual_workers_run_clean(sanitized_replay: Path) -> None:
    command = ["sh", str(sanitized_replay), "workers", str(400 * EFFORT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each told alike" in done.stdout


def test_histories_of_mirrors_run_clean(sanitized_replay: Path) -> None:
    command = ["sh", str(sanitized_replay), "mirrors", str(1000 * EFFORT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as the list says" in done.stdout


def test_histories_of_prefix_owners_run_clean(sanitized_replay: Path) -> None:
    command = ["sh", str(sanitized_replay), "owners", str(400 * EFFORT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as the sets say" in done.stdout


def test_costs_of_the_default_policy_run_clean(sanitized_replay: Path) -> None:
    command = ["sh", str(sanitized_replay), "warmset", str(400 * EFFORT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each cost is a number" in done.stdout


def test_weights_of_sessions_run_clean(sanitized_replay: Path) -> None:
    command = ["sh", str(sanitized_replay), "weights", str(400 * EFFORT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each weight is a chance" in done.stdout


def test_worker_sets_run_clean(sanitized_replay: Path) -> None:
    command = ["sh", str(sanitized_replay), "sets", str(30 * EFFORT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as std::set says" in done.stdout


def test_readers_beside_a_writer_run_clean(sanitized_replay: Path) -> None:
    command = ["sh", str(sanitized_replay), "threads", str(100 * EFFORT)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer cannot run with this kernel's address layout")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "none torn" in done.stdout


@pytest.mark.parametrize("program", ["relay", "relay-threads"])
def test_the_relays_thread_runs_clean(sanitized_replay: Path, program: str) -> None:
    command = ["sh", str(sanitized_replay), program, str(10 * EFFORT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_hashes_of_plain_messages_of_every_length(sanitized_replay: Path) -> None:
    """Also the classes no block reaches (0 to 11 bytes), by the sanitized C++ program."""
    pattern = bytes(((i * i + 7 * i) >> 3) & 0xFF for i in range(2100))
    lines = subprocess.run(
        ["sh", str(sanitized_replay), "hashes"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert len(lines) == len(pattern) + 1
    for line in lines:
        size, got = map(int, line.split())
        assert got == xxhash.xxh3_64_intdigest(pattern[:size]), size
