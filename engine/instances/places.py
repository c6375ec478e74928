"""Where each instance listens: the ports after those that were given, or the system's choice."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations

MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class Place:
    """Ports of one instance; 0: the system picks. Lifetime: until the first instance serves."""

    port: int
    events_port: int
    replay_port: int

    def flags(self) -> list[str]:
        """As `serve` takes them."""
        ports = (self.port, self.events_port, self.replay_port)
        names = ("--port", "--events-port", "--replay-port")
        return [word for name, port in zip(names, ports, strict=True) for word in (name, str(port))]

    def settled(self, ready: str) -> Place:
        """What the system picked, as a ready line says: who knows it by it finds it there again.

        Raises ValueError for a line that does not say it.
        """
        found = re.match(
            r"ready https?://\S+:(\d+) .*\bevents=tcp://\S+:(\d+) replay=tcp://\S+:(\d+)\b", ready
        )
        if found is None:
            raise ValueError(f"not a ready line: {ready[:200]!r}")
        return Place(*map(int, found.groups()))


def places(instances: int, port: int, events_port: int, replay_port: int) -> list[Place]:
    """One a instance. Raises ValueError where ports run into each other or out of range."""
    first = {"--port": port, "--events-port": events_port, "--replay-port": replay_port}
    taken = {name: at for name, at in first.items() if at}
    for name, at in taken.items():
        if not 0 < at <= MAX_PORT - instances + 1:
            raise ValueError(f"{name} {at}: {instances} ports from there on are not all 1..65535")
    for (name, at), (other, beside) in combinations(taken.items(), 2):
        if abs(at - beside) < instances:
            raise ValueError(
                f"{instances} instances take {instances} ports from {name} {at} on and as many "
                f"from {other} {beside} on: they overlap"
            )
    return [
        Place(*(at + number if at else 0 for at in (port, events_port, replay_port)))
        for number in range(instances)
    ]
