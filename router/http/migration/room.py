"""How many token ids are kept to go on with, of one stream and of all."""

from __future__ import annotations

from typing import TypeAlias

import kvkernels


class Room:
    """Lifetime: process. Four bytes a token; the bounds may be changed while streams hold some."""

    def __init__(self, stream_tokens: int, tokens: int) -> None:
        self.stream_tokens = stream_tokens
        self.tokens = tokens
        self.taken = 0

    def take(self, more: int, of_stream: int) -> bool:
        """Keep `more` tokens of a stream, `of_stream` in all; beyond a bound False, and none."""
        if of_stream > self.stream_tokens or self.taken + more > self.tokens:
            return False
        self.taken += more
        return True

    def give(self, tokens: int) -> None:
        """A stream needs them no more."""
        self.taken -= tokens


AnyRoom: TypeAlias = "Room | kvkernels.RelayRoom"


def room_of_streams() -> AnyRoom:
    """Room for no token yet; one that the relay's thread shares where there is such a thing."""
    return Room(0, 0) if kvkernels.RelayRoom is None else kvkernels.RelayRoom(0, 0)
