"""A redis-server in its own network namespace, which can be cut off so that no packet
comes back.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_READY_S = 20.0
_PORT = 6379  # nothing else runs in that network


class WalledRedis:
    """A redis-server that can be cut off, with as much of `RedisServer`'s interface as that needs.
    Lifetime: test.
    """

    def __init__(self, folder: Path) -> None:
        number = os.getpid() % 250
        self._name, self._end = f"wr{number}", f"wrh{number}"
        self._here, self._host = f"10.213.{number}.1/30", f"10.213.{number}.2"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{self._host}:{_PORT}"

    def start(self) -> None:
        """Create the network and start the server.

        Raises subprocess.CalledProcessError if this process cannot create a network.
        """
        inside = f"wrn{self._end[3:]}"
        for words in (
            f"netns add {self._name}",
            f"link add {self._end} type veth peer name {inside} netns {self._name}",
            f"addr add {self._here} dev {self._end}",
            f"link set {self._end} up",
            f"-n {self._name} addr add {self._host}/30 dev {inside}",
            f"-n {self._name} link set {inside} up",
        ):
            subprocess.run(["ip", *words.split()], check=True, capture_output=True)
        self._folder.mkdir(exist_ok=True)
        command = ["ip", "netns", "exec", self._name, "redis-server", "--port", str(_PORT)]
        command += ["--bind", self._host, "--protected-mode", "no", "--save", ""]
        with (self._folder / "redis.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--dir", str(self._folder)], stdout=log, stderr=log
            )
        until = time.monotonic() + _READY_S
        while True:
            address = (self._host, _PORT)
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=1):
                return
            assert self._process.poll() is None, "redis-server ended"
            assert time.monotonic() < until, "redis-server does not listen"

    def pause(self) -> None:
        """Drop all packets to the server: clients get no answer, not even a refusal."""
        self._rule("add")

    def go_on(self) -> None:
        self._rule("del")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        subprocess.run(["ip", "netns", "del", self._name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._end], check=False, capture_output=True)

    def _rule(self, what: str) -> None:
        """Add or delete, inside the network, the routing rule that drops all incoming packets."""
        words = f"-n {self._name} rule {what} pref 1 from all iif lo blackhole".split()
        subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def walled_redis(folder: Path) -> Iterator[WalledRedis]:
    """Yield a running server and stop it at the end. Skips the test if no network can be made."""
    if shutil.which("ip") is None or shutil.which("redis-server") is None:
        pytest.skip("ip (Debian package: iproute2) or redis-server is not on this machine")
    server = WalledRedis(folder)
    try:
        try:
            server.start()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network of its own: {error.stderr.decode().strip()}")
        yield server
    finally:
        server.stop()
