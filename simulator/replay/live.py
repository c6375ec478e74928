"""A request under way."""

from __future__ import annotations

from policies.contract import Hashes
from simulator.replay.arrivals import Turn
from simulator.replay.station import Station


class Live:
    """Lifetime: request."""

    __slots__ = ("begun", "chain", "station", "turn")

    def __init__(self, turn: Turn, chain: Hashes) -> None:
        self.turn = turn
        self.chain = chain  # full blocks of its prompt, then those known of its answer
        self.station: Station | None = None  # where it was sent; None: held, or it failed there
        self.begun = False  # its client has the first token
