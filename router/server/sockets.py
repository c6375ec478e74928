"""Makes listening sockets, or uses inherited ones.

When a socket is closed, connections that are not accepted yet are lost, so a router that replaces
another one continues with the same sockets.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from contextlib import closing

Place = tuple[int, str, int]  # address family, host, port

BACKLOG = 1_024  # connections of each socket that may wait to be accepted


def listening_at(
    host: str, port: int, inherited: Iterable[socket.socket] = (), *, shared: bool = False
) -> list[socket.socket]:
    """Return the sockets to listen with, at least one for each address of `host`.

    Inherited sockets are used if they fit, else closed. Port 0 means the inherited port, else any
    free one. `shared` lets other programs listen on the same port.

    Raises OSError if another program has the port, or if `host` is not an address of this machine.
    """
    left = list(inherited)
    found: list[socket.socket] = []
    made: list[socket.socket] = []
    if port == 0 and left:
        port = _place(left[0])[2]
    try:
        for family, name in _addresses(host):
            ours = [one for one in left if _place(one) == (family, name, port)]
            left = [one for one in left if one not in ours]
            if not ours:
                ours = [_made((family, name, port), shared)]
                made += ours
            port = _place(ours[0])[2]
            found += ours
    except OSError:
        close_all(made)
        raise
    close_all(left)
    return found


def check_free(host: str, port: int, *, shared: bool = False) -> None:
    """Raise OSError if `listening_at` would; nothing listens meanwhile."""
    for family, name in _addresses(host):
        with closing(_bound((family, name, port), share=shared)):
            pass


def close_all(sockets: Iterable[socket.socket]) -> None:
    """Close these sockets in this process; other processes that have them can still use them."""
    for one in sockets:
        one.close()


def cannot_listen(host: str, port: int, error: OSError, flag: str = "") -> OSError:
    """Return an error of `listening_at` with a text for people. `flag` sets the port."""
    shown = f" ({flag})" if flag else ""
    return OSError(f"cannot listen on {host}, port {port}{shown}: {_why(error)}")


def _made(place: Place, shared: bool) -> socket.socket:
    """Return a new listening socket. Raises OSError if that fails."""
    if not shared:
        _check_free(place)
    one = _bound(place, share=True)
    try:
        one.listen(BACKLOG)
    except OSError:
        one.close()
        raise
    return one


def _addresses(host: str) -> list[tuple[int, str]]:
    """Return the address family and address of each address that a host name has. Raises OSError if
    it has none.
    """
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((int(kind), str(address[0])) for kind, _, _, _, address in found))


def _place(one: socket.socket) -> Place:
    host, port = one.getsockname()[:2]
    return int(one.family), str(host), int(port)


def _check_free(place: Place) -> None:
    """Raise OSError if the port is taken. Without this check, another router at this port would go
    unnoticed, because of SO_REUSEPORT.
    """
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
