"""Tests of the C++ code, built with the address and undefined-behaviour sanitizers, over random
histories.
"""

import subprocess
from pathlib import Path

import pytest
import xxhash

from tests.effort import EFFORT


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("histories", 600), "as the model says"),
        (("workers", 150), "each told alike"),
        (("mirrors", 250), "as the list says"),
        (("owners", 120), "as the sets say"),
        (("warmset", 400), "each cost is a number"),
        (("weights", 400), "each weight is a chance"),
        (("trunks", 400), "each trunk told was the prompt's"),
        (("sets", 10), "as std::set says"),
    ],
    ids=["histories", "workers", "mirrors", "owners", "warmset", "weights", "trunks", "sets"],
)
def test_random_histories_pass_the_sanitizers(
    sanitized_replay: Path, arguments: tuple[str, int], said: str
) -> None:
    program, lives = arguments
    command = ["sh", str(sanitized_replay), program, str(lives * EFFORT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout


def test_readers_beside_a_writer_pass_the_thread_sanitizer(sanitized_replay: Path) -> None:
    command = ["sh", str(sanitized_replay), "threads", str(40 * EFFORT)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer cannot run with this kernel's address layout")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "none torn" in done.stdout


@pytest.mark.parametrize("program", ["relay", "relay-threads"])
def test_the_relays_thread_passes_the_sanitizers(sanitized_replay: Path, program: str) -> None:
    command = ["sh", str(sanitized_replay), program, str(10 * EFFORT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_messages_of_every_length_are_hashed_correctly(sanitized_replay: Path) -> None:
    """The sanitized C++ program hashes plain messages of every length, including classes that no
    block reaches (0 to 11 bytes).
    """
    pattern = bytes(((i * i + 7 * i) >> 3) & 0xFF for i in range(2100))
    lines = subprocess.run(
        ["sh", str(sanitized_replay), "hashes"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert len(lines) == len(pattern) + 1
    for line in lines:
        size, got = map(int, line.split())
        assert got == xxhash.xxh3_64_intdigest(pattern[:size]), size
