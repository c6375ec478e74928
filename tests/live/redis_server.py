"""A real redis-server for a test, which can be stopped, killed, paused and started again with no
data.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.frozen import freeze
from tests.live.ports import lasting_port

_READY_S = 20.0

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server is not on this machine"
)


class RedisServer:
    """A redis-server process; `more` has further command-line options. Lifetime: test."""

    def __init__(self, folder: Path, *more: str, port: int | None = None) -> None:
        self.folder = folder
        self.port = lasting_port() if port is None else port
        self.more = more
        self.bus = ""  # the other port, for a node of a cluster
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server with an empty database; it saves nothing."""
        self.folder.mkdir(exist_ok=True)
        command = ["redis-server", *self.more[:1]] if self._has_file() else ["redis-server"]
        options = self.more[1:] if self._has_file() else self.more
        own = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        own += [] if "--sentinel" in options else ["--save", ""]
        with (self.folder / f"redis-{self.port}.log").open("ab") as log:
            self._process = subprocess.Popen([*command, *own, *options], stdout=log)
        until = time.monotonic() + _READY_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            assert self._process.poll() is None, "redis-server ended"
            assert time.monotonic() < until, "redis-server does not listen"
            time.sleep(0.01)

    def client(self, **options: Any) -> redis.Redis:
        """Return a Redis client for the test's own commands."""
        return redis.Redis(port=self.port, socket_timeout=5, **options)

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop the process with SIGSTOP; its connections stay open."""
        assert self._process is not None
        freeze(self._process.pid)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _has_file(self) -> bool:
        return bool(self.more) and not self.more[0].startswith("--")


@contextlib.contextmanager
def redis_server(folder: Path, *more: str) -> Iterator[RedisServer]:
    """Yield a running redis-server and stop it at the end."""
    server = RedisServer(folder, *more)
    server.start()
    try:
        yield server
    finally:
        server.kill()
