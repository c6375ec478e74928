"""Reads peers' IP addresses: whether a trusted network has them, and under which name a client's
connections are counted.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Network = IPv4Network | IPv6Network


def address_of(host: str) -> IPv4Address | IPv6Address | None:
    """Return a peer's IP address; None if it has none, for example at a Unix socket.

    A socket that listens on "::" reports IPv4 peers as IPv6; their addresses are returned as IPv4.
    """
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def trusts(networks: tuple[Network, ...], host: str) -> bool:
    """Return whether the peer's address is in one of `networks`."""
    address = address_of(host) if networks else None
    return address is not None and any(address in network for network in networks)


def counted_as(host: str) -> str:
    """Return the name under which a client's connections are counted; all addresses of an IPv6 /64
    are one client.
    """
    address = address_of(host)
    if isinstance(address, IPv6Address):
        return str(IPv6Network((address, 64), strict=False))
    return host if address is None else str(address)
