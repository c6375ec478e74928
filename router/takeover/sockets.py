"""Listening sockets: made, inherited, and shared out among processes.

Those of several processes share a port (SO_REUSEPORT): the system spreads connections over them. A
socket that is closed takes with it the connections that nobody has accepted yet; so where a router
follows another one, it goes on with the very sockets of that one.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Sequence
from contextlib import closing

Place = tuple[int, str, int]  # address family, host, port

BACKLOG = 1_024  # connections that wait to be accepted, of each socket


def listening_at(
    host: str, port: int, seats: int, inherited: Iterable[socket.socket] = ()
) -> list[list[socket.socket]]:
    """For each of `seats` processes the sockets it listens with, one for each address of `host`.

    Of `inherited`, which may be of another address, what fits is used and the rest closed. Port 0:
    the inherited one, else any that is free. Raises OSError where somebody else has the port, or
    where `host` is no address of this machine.
    """
    left = list(inherited)
    shares: list[list[socket.socket]] = [[] for _ in range(seats)]
    made: list[socket.socket] = []
    if port == 0 and left:
        port = _place(left[0])[2]
    try:
        for family, name in _addresses(host):
            ours = [one for one in left if _place(one) == (family, name, port)]
            left = [one for one in left if one not in ours]
            more = _made((family, name, port), seats - len(ours), ours)
            made += more
            ours += more
            port = _place(ours[0])[2]
            for number, one in enumerate(ours):
                shares[number % seats].append(one)
    except OSError:
        close_all(made)
        raise
    close_all(left)
    return shares


def bound(share: Sequence[socket.socket]) -> str:
    """HOST:PORT of a process's sockets, the first of them."""
    _, host, port = _place(share[0])
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def number_of(share: Sequence[socket.socket]) -> int:
    """The port's number."""
    return _place(share[0])[2]


def rest(share: Iterable[socket.socket]) -> None:
    """Let nobody wait at these sockets until somebody listens with them again.

    The system gives connections to others that share the port meanwhile.
    """
    for one in share:
        try:
            one.shutdown(socket.SHUT_RD)
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # nobody has listened with it yet
                raise


def close_all(sockets: Iterable[socket.socket]) -> None:
    """Let go; who else has them goes on with them."""
    for one in sockets:
        one.close()


def cannot_listen(host: str, port: int, error: OSError) -> OSError:
    """`error`, of `listening_at`, for people."""
    return OSError(f"cannot listen on {host}, port {port}: {_why(error)}")


def _made(place: Place, count: int, beside: Sequence[socket.socket]) -> list[socket.socket]:
    """So many more at a place, where we have those `beside`. Raises OSError."""
    if count <= 0:
        return []
    if not beside:
        _check_free(place)
    made: list[socket.socket] = []
    try:
        for _ in range(count):
            one = _bound(place, share=True)
            made.append(one)
            place = _place(one)
            one.listen(BACKLOG)
    except OSError:
        close_all(made)
        raise
    return made


def _addresses(host: str) -> list[tuple[int, str]]:
    """(Address family, address) of a name. Raises OSError."""
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((int(kind), str(address[0])) for kind, _, _, _, address in found))


def _place(one: socket.socket) -> Place:
    host, port = one.getsockname()[:2]
    return int(one.family), str(host), int(port)


def _check_free(place: Place) -> None:
    """Raises OSError. Among those who share a port another router's processes would not show."""
    if place[2]:
        with closing(_bound(place, share=False)):
            pass


def _bound(place: Place, share: bool) -> socket.socket:
    family, host, port = place
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind((host, port))
        one.setblocking(False)
    except OSError:
        one.close()
        raise
    return one


def _why(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the host's name cannot be resolved ({error.strerror})"
    if error.errno == errno.EADDRNOTAVAIL:
        return "the host is no address of this machine"
    if error.errno == errno.EADDRINUSE:
        return "address already in use: stop what listens there, or choose another port"
    return error.strerror or str(error)
