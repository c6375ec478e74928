"""What a router leaves to the one that follows it, and how the two tell each other.

The follower connects to a Unix socket and says `HELLO`. It gets a head of four bytes, the length
of an `Estate` as JSON, little endian; the JSON; and, in messages of one byte, the listening sockets
(SCM_RIGHTS, unix(7)), 64 at a time: all of clients, then all of the admin port. Once it serves it
says `SERVING`; the one before accepts nothing more from then on and says `GONE`.
"""

from __future__ import annotations

import struct

import msgspec

HELLO = b"warmroute takeover 1\n"
SERVING = b"serving\n"
GONE = b"gone\n"
HEAD = struct.Struct("<I")
MOST_BYTES = 8 << 20  # of an estate: 4,096 workers of 2 KB
SOCKETS_AT_ONCE = 64  # Linux lets 253 pass in one message
MOST_SOCKETS = 4_096


class Worker(msgspec.Struct, frozen=True):
    """One worker, or one rank, as it is followed now."""

    name: str  # URL, or URL#rank
    draining: bool
    ready: bool
    known: bool  # all of its cache is


class Estate(msgspec.Struct, frozen=True):
    """Besides sockets, and besides what stands in files (`kv_state`)."""

    client_sockets: int
    admin_sockets: int
    added: tuple[str, ...]  # workers added by hand, as `parse_worker_spec` reads them
    workers: tuple[Worker, ...]
    found: tuple[tuple[str, str], ...] = ()  # (source of discovery, worker that it is believed)
