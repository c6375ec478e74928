"""What systemd is told: sd_notify(3), a datagram to the socket that $NOTIFY_SOCKET names."""

from __future__ import annotations

import os
import socket


def notify(*lines: str) -> None:
    """`READY=1` and the like; nothing where nobody wants to know."""
    where = os.environ.get("NOTIFY_SOCKET", "")
    if not where.startswith(("/", "@")):
        return
    address = "\0" + where[1:] if where.startswith("@") else where
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
            line.sendto("\n".join(lines).encode(), address)
    except OSError:
        pass  # who started us went away: it matters to nobody then


def notify_ready() -> None:
    """This process is the one that serves, also where another one was before."""
    notify(f"MAINPID={os.getpid()}", "READY=1", "STATUS=serving")
