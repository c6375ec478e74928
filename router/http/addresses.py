"""Addresses of peers: trusted networks, and the name under which one client is counted."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Network = IPv4Network | IPv6Network


def address_of(host: str) -> IPv4Address | IPv6Address | None:
    """A peer's address; None for what is none, as of a Unix socket.

    A socket that listens on "::" shows IPv4 peers as IPv6: those are given as IPv4.
    """
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def trusts(networks: tuple[Network, ...], host: str) -> bool:
    """Whether the peer's address lies in one of `networks`."""
    address = address_of(host) if networks else None
    return address is not None and any(address in network for network in networks)


def counted_as(host: str) -> str:
    """The name under which a client's connections are counted: an IPv6 client has a whole /64."""
    address = address_of(host)
    if isinstance(address, IPv6Address):
        return str(IPv6Network((address, 64), strict=False))
    return host if address is None else str(address)
