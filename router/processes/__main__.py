"""One of several processes, as the supervisor starts it: `SEAT... serve FLAGS...`."""

from __future__ import annotations

import sys

from router.logs import configure
from router.processes.seat import LEADER, SEAT_ARGUMENTS, seat_of


def main() -> int:
    """Be the leader, or a satellite; returns the exit status."""
    seat = seat_of(sys.argv[1 : 1 + SEAT_ARGUMENTS])
    if seat.number == LEADER:
        from router.cli import main as command

        return command(sys.argv[1 + SEAT_ARGUMENTS :], seat)
    configure("warning", "text")  # until the leader tells how
    import uvloop

    from router.processes.satellite import serve_clients

    try:
        uvloop.run(serve_clients(seat))
    except (OSError, TimeoutError, ValueError) as error:
        print(f"error: satellite {seat.number}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
