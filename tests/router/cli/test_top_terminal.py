"""Tests of `warmroute top` in a terminal: it follows a router, obeys keys, and restores
the screen.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from router.cli import top
from router.cli.top import top_command

WORKER = {"id": 3, "url": "http://10.0.0.3:8000", "state": "ready", "inflight_requests": 5}


class Admin(ThreadingHTTPServer):
    """The part of an admin port that `warmroute top` uses. Lifetime: test."""

    def __init__(self) -> None:
        self.looks = 0
        self.away_after = math.inf  # looks
        super().__init__(("127.0.0.1", 0), AdminAnswers)


class AdminAnswers(BaseHTTPRequestHandler):
    """Answers the requests of one connection. Lifetime: request."""

    server: Admin

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        answers: dict[str, Any] = {
            "/workers": {"workers": [WORKER]},
            "/explain": {"decisions": []},
        }
        if path == "/metrics":
            self.server.looks += 1
            body = f"warmroute_decisions_total {self.server.looks}.0\n".encode()
        else:
            body = json.dumps(answers[path]).encode()
        self.send_response(503 if self.server.looks > self.server.away_after else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *said: Any) -> None:
        """Suppress the server's log lines."""


@pytest.fixture
def admin() -> Iterator[Admin]:
    with Admin() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


class Terminal:
    """A pseudo-terminal to which `warmroute top` writes. Lifetime: test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown = ""
        self._ours, theirs = os.openpty()
        monkeypatch.setattr("sys.stdin", os.fdopen(theirs, closefd=False))
        monkeypatch.setattr("sys.stdout", os.fdopen(theirs, "w", closefd=False))

    def until(self, text: str) -> None:
        """Read the terminal until the text is shown."""
        before = len(self.shown)
        while text not in self.shown[before:]:
            self.shown += os.read(self._ours, 65_536).decode()

    def press_key(self, key: str) -> None:
        os.write(self._ours, key.encode())


def run_top(url: str, play: Callable[[], None]) -> int:
    """Run `top` while `play` reads from and types into the terminal; return the exit status."""
    player = threading.Thread(target=play, daemon=True)
    player.start()
    status = top_command(argparse.Namespace(admin=url, admin_key_file=None, once=False))
    player.join(10)
    assert not player.is_alive()
    return status


def test_top_refreshes_obeys_keys_and_restores_the_terminal(
    admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "_EVERY_S", 0.02)
    terminal = Terminal(monkeypatch)
    url = f"http://127.0.0.1:{admin.server_port}"

    def play() -> None:
        terminal.until(f"warmroute top  {url}")
        terminal.until("10.0.0.3:8000")
        looks = admin.looks
        while admin.looks < looks + 2:
            terminal.until("requests/s")
        terminal.press_key("p")
        terminal.until("PAUSED")
        terminal.press_key("s")
        terminal.press_key("p")
        admin.away_after = 0
        terminal.until("! GET ")
        terminal.press_key("q")
        terminal.until("\x1b[?1049l")

    assert run_top(url, play) == 0
    assert terminal.shown.startswith("\x1b[?1049h")
    assert terminal.shown.endswith("\x1b[?1049l")


def test_the_once_option_prints_one_plain_frame_with_rates(
    admin: Admin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top, "_EVERY_S", 0.02)
    url = f"http://127.0.0.1:{admin.server_port}"
    asked = argparse.Namespace(admin=url, admin_key_file=None, once=True)
    assert top_command(asked) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "workers 1: 1 ready" in said
    assert "requests/s -" not in said
    for looks in (1, 0):  # it leaves between the two looks, or is away from the beginning
        admin.away_after = admin.looks + looks
        assert top_command(asked) == 1
        assert capsys.readouterr().err.startswith("error: GET ")
