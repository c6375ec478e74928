"""Reserves ports for programs that are stopped and started again at the same address."""

from __future__ import annotations

import itertools
import os
import socket

# Tests that run in parallel (pytest-xdist) use different ports, one after another.
_SIDE_BY_SIDE = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_OURS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
# Below the ports that the system gives to outgoing connections.
_PORTS = 10_000 // _SIDE_BY_SIDE
_FIRST = 20_000 + _OURS * _PORTS
# Another run's tests begin at another port.
_turn = itertools.count(os.getpid() * 61)


def lasting_port() -> int:
    """Return a free loopback port that stays free while its program is down.

    While a program is down, a port that the system chose (`--port 0`) may be taken by any outgoing
    connection.
    """
    for turn in itertools.islice(_turn, _PORTS):
        port = _FIRST + turn % _PORTS
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port is free from {_FIRST} to {_FIRST + _PORTS - 1}")
