"""ZMQ framing of KV event batches, without sockets: live messages and replay.

Live (PUB): `[topic, seq, payload]`. Replay (ROUTER; ask with a DEALER, since a REQ socket
receives the first reply only): request `[identity, "", start_seq]`, one reply per batch
`[identity, "", topic, seq, payload]` (vLLM from 0.27) or without the topic (before), then an end
marker whose seq is -1 and whose payload is empty. Sequence numbers are 8 bytes, big-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.wire.errors import WireError

END_SEQ = (1 << 64) - 1  # -1 as unsigned: the replay is over
MAX_SEQ = (1 << 63) - 1  # nobody gets there by counting, and one more still is a number
MAX_TOPIC_BYTES = 1024


_END = END_SEQ.to_bytes(8, "big")


class Live(NamedTuple):
    """A live message taken apart."""

    topic: str
    seq: int
    payload: bytes


def live_frames(topic: str, seq: int, payload: bytes) -> list[bytes]:
    """The three frames of a live message."""
    return [topic.encode(), seq.to_bytes(8, "big"), payload]


def parse_live(frames: Sequence[bytes]) -> Live:
    """The live message in `frames`; raises WireError."""
    if len(frames) != 3:
        raise WireError(f"live message of {len(frames)} frames; expected topic, seq, payload")
    return Live(_topic(frames[0]), _seq(frames[1]), frames[2])


def replay_request(start_seq: int) -> list[bytes]:
    """What a DEALER sends to get every buffered batch from `start_seq` on."""
    return [b"", start_seq.to_bytes(8, "big")]


def parse_replay_request(frames: Sequence[bytes]) -> tuple[bytes, int]:
    """(identity, start_seq) as a ROUTER receives them; raises WireError."""
    if len(frames) != 3 or frames[1] != b"":
        raise WireError("replay request must be three frames: identity, empty, start_seq")
    return frames[0], _seq(frames[2])


def replay_frames(identity: bytes, topic: str, seq: int, payload: bytes) -> list[bytes]:
    """One reply of a ROUTER."""
    return [identity, b"", topic.encode(), seq.to_bytes(8, "big"), payload]


def replay_end(identity: bytes) -> list[bytes]:
    """The end marker of a ROUTER."""
    return [identity, b"", b"", END_SEQ.to_bytes(8, "big"), b""]


def parse_replay(frames: Sequence[bytes]) -> Live | None:
    """One reply as a DEALER receives it, old form or new; None at the end marker."""
    if len(frames) not in (3, 4) or frames[0] != b"":
        raise WireError(f"replay reply of {len(frames)} frames; expected an empty one and 2 or 3")
    if frames[-2] == _END:
        return None
    return Live(_topic(frames[1]) if len(frames) == 4 else "", _seq(frames[-2]), frames[-1])


def _seq(frame: bytes) -> int:
    if len(frame) != 8:
        raise WireError(f"sequence number of {len(frame)} bytes; expected 8")
    seq = int.from_bytes(frame, "big")
    if seq > MAX_SEQ:
        raise WireError(f"sequence number {seq}; at most {MAX_SEQ}")
    return seq


def _topic(frame: bytes) -> str:
    if len(frame) > MAX_TOPIC_BYTES:
        raise WireError(f"topic of {len(frame)} bytes; at most {MAX_TOPIC_BYTES}")
    try:
        return frame.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"topic is not UTF-8: {error}") from error
