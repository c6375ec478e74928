"""SIGUSR2: start the router that follows this one, by the same command in the same environment."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Sequence

log = logging.getLogger(__name__)


class Successor:
    """Lifetime: process."""

    def __init__(self, argv: Sequence[str], takeover: str | None) -> None:
        """`argv` are the arguments of this router's command; `takeover` is the key's value."""
        self._argv = list(argv)
        self._takeover = takeover
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, unless one is starting already. It takes over by itself."""
        if self._takeover is None:
            log.error("SIGUSR2: no follower is started: the key `takeover` names no socket")
            return
        if self._process is not None and self._process.poll() is None:
            log.warning("SIGUSR2: process %d is about to follow already", self._process.pid)
            return
        command = [sys.executable, "-P", "-m", "router", *self._argv]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        except OSError as error:
            log.error("SIGUSR2: no follower can be started: %s", error)
            return
        log.info("SIGUSR2: process %d is started to follow", self._process.pid)
        threading.Thread(target=_reap, args=(self._process,), daemon=True).start()


def _reap(process: subprocess.Popen[bytes]) -> None:
    """A follower outlives us where all goes well."""
    status = process.wait()
    log.error("the follower, process %d, ended with status %d", process.pid, status)
