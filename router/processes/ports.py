"""The ports that several processes share, held by the supervisor: children come and go.

Each process has listening sockets of its own (SO_REUSEPORT), given to it when it is started: who
connects while one is being replaced waits for the next.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass

from router.config.schema import Config
from router.takeover.sockets import cannot_listen, close_all, listening_at, number_of, rest
from router.takeover.taking import Inheritance


@dataclass(frozen=True, slots=True)
class HeldPorts:
    """Lifetime: process."""

    client: list[list[socket.socket]]  # by seat
    admin: list[socket.socket]

    @property
    def numbers(self) -> tuple[int, int]:
        """Of the clients' port and of the admin port."""
        return number_of(self.client[0]), number_of(self.admin)

    def all_of_clients(self) -> list[socket.socket]:
        """Those of all seats."""
        return [one for share in self.client for one in share]

    def rest(self, seat: int) -> None:
        """Let nobody wait for a process that is not started anew at once."""
        rest(self.client[seat])

    def close(self) -> None:
        """Let go."""
        close_all((*self.all_of_clients(), *self.admin))


def hold_ports(config: Config, before: Inheritance | None) -> HeldPorts:
    """New sockets, or those of the router before where they fit.

    Raises OSError that says which address cannot be had, and why.
    """
    client, admin = ((), ()) if before is None else (before.client, before.admin)
    shares = _shares(config.host, config.port, config.processes, client)
    try:
        held = _shares(config.admin_host, config.admin_port, 1, admin)
    except OSError:
        close_all(one for share in shares for one in share)
        raise
    return HeldPorts(shares, held[0])


def _shares(
    host: str, port: int, seats: int, inherited: Iterable[socket.socket]
) -> list[list[socket.socket]]:
    try:
        return listening_at(host, port, seats, inherited)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
