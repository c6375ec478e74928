"""What a replica is called, and the names of the keys that it shares with its peers."""

from __future__ import annotations

import re
import secrets
import socket
from dataclasses import dataclass

_IDENTITY = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,63}@[0-9a-f]{16}")
_STRANGE = re.compile(r"[^A-Za-z0-9._-]")
_MOST_NAME_CHARS = 64


def new_identity(name: str) -> str:
    """`name@epoch`: a router begun anew under the same name is another peer.

    `name`: as configured; empty: the host's.
    """
    if not name:
        name = _STRANGE.sub("-", socket.gethostname()).lstrip("._-")[:_MOST_NAME_CHARS] or "router"
    return f"{name}@{secrets.token_hex(8)}"


def name_of(identity: str) -> str:
    """The name in it."""
    return identity.rpartition("@")[0]


def read_identity(text: bytes) -> str | None:
    """Another's, as it came; None: it is none."""
    return text.decode("ascii") if _IDENTITY.fullmatch(text) else None


@dataclass(frozen=True, slots=True)
class Keys:
    """Of one fleet. The braces keep all of them in one slot of a cluster. Lifetime: process."""

    fleet: str

    @property
    def replicas(self) -> str:
        """Hash, identity -> `roll.Entry` as JSON."""
        return f"warmroute:{{{self.fleet}}}:replicas"

    @property
    def arrivals(self) -> str:
        """Stream of those who joined, so that peers need not wait for their next look."""
        return f"warmroute:{{{self.fleet}}}:arrivals"

    def said(self, identity: str) -> str:
        """Stream of what a replica says."""
        return f"warmroute:{{{self.fleet}}}:said:{identity}"

    def lease(self, what: str) -> str:
        """String: who has `what` to itself."""
        return f"warmroute:{{{self.fleet}}}:lease:{what}"

    def fence(self, what: str) -> str:
        """String: the latest fencing token of that lease."""
        return f"warmroute:{{{self.fleet}}}:fence:{what}"
