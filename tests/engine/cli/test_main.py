"""Tests of `warmroute-engine` as a program: its flags, its ready line, its ports, and how
it ends.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import pytest

from engine.cli.main import main
from engine.profiles import PROFILES

START_S = 30.0
READY = re.compile(
    r"ready (?P<url>http://127\.0\.0\.1:\d+) model=(?P<model>\S+) events=(?P<events>tcp://\S+) "
    r"replay=(?P<replay>tcp://\S+) kv_tokens=(?P<kv_tokens>\d+)\n"
)


class Program(NamedTuple):
    """A worker that runs as a process, with the fields of its ready line."""

    process: subprocess.Popen[str]
    ready: dict[str, str]

    def open_stream(self, tokens: int) -> IO[bytes]:
        """Open a stream of `tokens` tokens; return it with its first event already read."""
        body = json.dumps({"prompt": [1, 2, 3], "max_tokens": tokens, "stream": True})
        request = urllib.request.Request(
            self.ready["url"] + "/v1/completions", data=body.encode(), method="POST"
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        reply: IO[bytes] = opener.open(request, timeout=START_S)
        assert reply.readline().startswith(b"data: ")
        return reply


def command(*flags: str) -> list[str]:
    base = [sys.executable, "-m", "engine", "--timed", "llama-3.1-8b-h100", "--port", "0"]
    return [*base, *flags]


@contextlib.contextmanager
def program(*flags: str) -> Iterator[Program]:
    """Start `python -m engine` and yield it once it is ready; kill it at the end if it
    still runs.
    """
    process = subprocess.Popen(
        command(*flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        match = READY.fullmatch(process.stdout.readline())
        assert match is not None, process.stderr.read() if process.stderr else ""
        yield Program(process, match.groupdict())
    finally:
        process.kill()
        process.communicate()


def test_a_worker_stops_cleanly_once_its_stream_ends_in_the_grace_period() -> None:
    with program("--model-name", "m/x", "--kv-tokens", "1000", "--speed", "4") as worker:
        assert worker.ready["model"] == "m/x"
        assert worker.ready["kv_tokens"] == "992"  # whole blocks of 16
        reply = worker.open_stream(100)  # lasts about 0.2 s
        worker.process.send_signal(signal.SIGTERM)
        assert reply.read().endswith(b"data: [DONE]\n\n"), "the running stream may end"
        assert worker.process.wait(START_S) == 0


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]])
def test_streams_longer_than_the_grace_period_are_cut(signals: list[signal.Signals]) -> None:
    # A second signal ends a long grace.
    grace = "0.1" if len(signals) == 1 else "60"
    with program("--grace-s", grace) as worker:
        reply = worker.open_stream(100_000)
        begun_s = time.monotonic()
        for name in signals:
            worker.process.send_signal(name)
            if name is not signals[-1]:
                wait_until_refused(worker.ready["url"])
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            reply.read()
        assert worker.process.wait(START_S) == 0
        assert time.monotonic() - begun_s < START_S


def wait_until_refused(url: str) -> None:
    """Wait until the program refuses connections, which means that it has seen its first signal."""
    host, port = url.removeprefix("http://").split(":")
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            return
    pytest.fail("the port is still open")


@pytest.mark.parametrize("flag", ["--port", "--events-port", "--replay-port"])
def test_a_port_in_use_gives_a_one_line_error(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = subprocess.run(
            command(flag, port), capture_output=True, text=True, timeout=START_S, check=False
        )
    assert ended.returncode == 1
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert f"{flag} {port}" in line
    assert "in use" in line


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "--timed"),
        (["--timed", "gpt-9"], "qwen3-32b-h100-tp2"),
        (["--timed", "llama-3.1-8b-h100", "--speed", "0"], "speed must be above 0"),
        (["--timed", "llama-3.1-8b-h100", "--speed", "nan"], "speed must be above 0"),
        (["--timed", "llama-3.1-8b-h100", "--kv-tokens", "7"], "at least one block of 16"),
        (["--timed", "llama-3.1-8b-h100", "--block-size", "0"], "1..1024"),
        (["--timed", "llama-3.1-8b-h100", "--port", "70000"], "0..65535"),
        (["--timed", "llama-3.1-8b-h100", "--max-num-tokens", "8"], "at least max_batch_size"),
        (["--timed", "llama-3.1-8b-h100", "--log-level", "loud"], "warning"),
        (["--timed", "llama-3.1-8b-h100", "--nonsense"], "--nonsense"),
    ],
)
def test_bad_flags_are_rejected(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_a_missing_tokenizer_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--timed", "llama-3.1-8b-h100", "--tokenizer", str(tmp_path)]) == 1
    assert "tokenizer.json" in capsys.readouterr().err


def test_help_shows_a_curl_command_and_all_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "curl" in text
    for name in PROFILES:
        assert name in text
