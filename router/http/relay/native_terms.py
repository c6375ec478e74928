"""A worker's limits and a request's timeouts as the relay's thread takes them."""

from __future__ import annotations

import kvkernels
from router.http.relay.reply import RelayLimits, Timeouts


def times_of(timeouts: Timeouts) -> kvkernels.RelayTimeouts:
    """The thread's view of a request's timeouts."""
    return kvkernels.RelayTimeouts(
        timeouts.connect_s,
        timeouts.send_s,
        timeouts.first_byte_s,
        timeouts.between_s,
        timeouts.client_s,
    )


def pool_of(limits: RelayLimits) -> kvkernels.RelayPool:
    """The thread's view of one worker's connections."""
    return kvkernels.RelayPool(
        limits.max_connections,
        limits.idle_s,
        limits.header_bytes,
        limits.chunk_line_bytes,
        limits.held_bytes,
        limits.held_s,
        limits.tail_bytes,
        limits.progress_s,
    )
