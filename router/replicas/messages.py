"""The messages between replicas, as msgpack arrays (`docs/reference/wire.md`).

A message is [version, number, open requests, retelling, wanted peers, [request events...], [use of
keys...], [messages about KV events...]]. Request events keep the order in which they happened.
Messages are numbered from 0 without a gap, so that a replica notices when it misses one; it asks
(`wants`), and the publisher sends all its open requests again.

One replica reads a worker's KV events. It publishes the batches that it applied in order to all
others, numbered without a gap. A replica that misses one asks (`KvWanted`) and gets a snapshot of
all that the reader knows. A token is the fencing token of the reader's lease; the greater token is
the valid one.

Where each replica reads a worker's events for itself, a replica that lacks some asks another one
for a snapshot (`KvAsked`), which comes with the token `UNREAD`.
"""

from __future__ import annotations

from collections import deque
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

PIECE_BYTES = 64 << 10
MAX_BATCH_PIECES = 64  # a longer batch is replaced by a snapshot
MAX_SNAPSHOT_PIECES = 1 << 12  # 15 million blocks
UNREAD = 0  # token for a worker that no replica reads for others; no lease has it

_Name = Annotated[str, Meta(max_length=2_048)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Digest = Annotated[int, Meta(ge=0)]  # msgpack has nothing above 64 bits
_Body = Annotated[bytes, Meta(max_length=PIECE_BYTES)]
_Piece = Annotated[int, Meta(ge=0, lt=MAX_SNAPSHOT_PIECES)]
_Pieces = Annotated[int, Meta(ge=1, le=MAX_SNAPSHOT_PIECES)]


class KvHead(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """A message in which the sender says that it reads this worker's events, and that its next
    batch has the number `number`.

    `first` is the number of the sender's first batch. The reader before it had then reached the
    place (`after_token`, `after_number`): a replica that knows all batches up to that place need
    not ask for a snapshot. Both are 0 if there was no such place.
    """

    worker: _Name
    token: _Number
    number: _Number
    first: _Number = 0
    after_token: _Number = 0
    after_number: _Number = 0


class KvBatch(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """A piece of a batch of KV events, as the engine published them."""

    worker: _Name
    token: _Number
    number: _Number
    seq: _Number  # by its publisher
    digest: _Digest
    piece: _Piece
    pieces: _Pieces
    body: _Body


class KvSnapshot(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """A piece of a snapshot of a worker's cache (`router.core.workers.snapshot`), taken before the
    batch `number`.
    """

    worker: _Name
    token: _Number
    number: _Number
    piece: _Piece
    pieces: _Pieces
    body: _Body


class KvWanted(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """A message that asks the reader of this worker's events for what follows. The sender knows all
    batches before `number`, or nothing if it is 0.
    """

    worker: _Name
    token: _Number
    number: _Number


class KvAsked(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """A message that asks `peer` to publish a snapshot of this worker, whose events each replica
    reads for itself.
    """

    worker: _Name
    peer: _Name


class KvNone(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    """The answer to a replica that asked for a snapshot of this worker: the sender does not know
    the whole cache.
    """

    worker: _Name


KvMessage = KvHead | KvBatch | KvSnapshot | KvWanted | KvAsked | KvNone

_PLAIN_KV_BYTES = 96


def size_of(one: KvMessage) -> int:
    """Return the estimated size, in bytes, of a message about KV events."""
    body = len(one.body) if type(one) in (KvBatch, KvSnapshot) else 0  # type: ignore[union-attr]
    return _PLAIN_KV_BYTES + len(one.worker) + body


def pieces_of(body: bytes) -> list[bytes]:
    """Cut the body into pieces of at most `PIECE_BYTES` bytes; there is at least one."""
    starts = range(0, max(len(body), 1), PIECE_BYTES)
    return [body[start : start + PIECE_BYTES] for start in starts]


def snapshot_pieces(worker: str, token: int, number: int, body: bytes) -> deque[KvSnapshot] | None:
    """Return the messages that carry a snapshot, or None if it is too long."""
    bodies = pieces_of(body)
    if len(bodies) > MAX_SNAPSHOT_PIECES:
        return None
    count = len(bodies)
    return deque(KvSnapshot(worker, token, number, at, count, one) for at, one in enumerate(bodies))


class Pieces:
    """Joins a batch or snapshot from its pieces, which must arrive in order. Lifetime:
    subscription.
    """

    def __init__(self) -> None:
        # Tag and number of the body that these pieces belong to.
        self.of: tuple[str, int] | None = None
        self._bodies: list[bytes] = []

    def __len__(self) -> int:
        return len(self._bodies)

    def clear(self) -> None:
        """Drop the pieces that have arrived so far."""
        self.of, self._bodies = None, []

    def add(self, tag: str, one: KvBatch | KvSnapshot) -> bytes | None:
        """Add a piece. Return the whole body if this is its last piece, otherwise None."""
        of = tag, one.number
        if one.piece == 0:
            self.of, self._bodies = of, []
        elif of != self.of:
            return None
        elif one.piece != len(self._bodies):
            self.clear()
            return None
        self._bodies.append(one.body)
        if one.piece + 1 < one.pieces:
            return None
        whole = b"".join(self._bodies)
        self.clear()
        return whole


VERSION = 2

MAX_CHAIN_BLOCKS = 8_192  # of a prompt, told of each; what is longer is told as far as this
MAX_TOKENS = (1 << 31) - 1
HASH_TYPE = np.dtype("<u8")
_HASH_BYTES = HASH_TYPE.itemsize

RequestId = Annotated[int, Meta(ge=0, lt=1 << 62)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Name = Annotated[str, Meta(max_length=2_048)]
Chain = Annotated[bytes, Meta(max_length=MAX_CHAIN_BLOCKS * _HASH_BYTES)]
BlockSize = Annotated[int, Meta(ge=1, le=1 << 20)]


class Sent(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """A message to other routers that a request, or one of its two legs (prefill or decode), was
    sent to a worker.

    `chains` has pairs of a block size and the chain hashes of the prompt, as little-endian uint64.
    """

    request_id: RequestId  # the sender's number of this dispatch
    worker: Name
    model: Name
    prompt_tokens: Tokens
    uncached_tokens: Tokens
    stream: bool
    approximate: bool = False
    standing: Literal["new", "cold", "warm"] = "new"
    session: Name | None = None
    tenant: Name | None = None
    weight: Annotated[float, Meta(gt=0, le=1e9)] = 1.0
    longest_prompt_tokens: Tokens | None = None
    chains: Annotated[tuple[tuple[BlockSize, Chain], ...], Meta(max_length=8)] = ()
    group: Name | None = None  # this and the next ones as in `policies.facts.Identity`
    parent: Name | None = None
    final: bool = False


class Begun(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """A message that the first token of a request has arrived."""

    request_id: RequestId


class Grew(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """A message with the number of tokens that a request's answer has by now."""

    request_id: RequestId
    output_tokens: Tokens


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """A message that a request is no longer at its worker. `answered` says whether it got an
    answer, whose tokens the worker counted.
    """

    request_id: RequestId
    answered: bool = False
    prompt_tokens: Tokens | None = None
    cached_tokens: Tokens | None = None
    output_tokens: Tokens | None = None


class Used(msgspec.Struct, frozen=True, array_like=True):
    """A message with the sender's use of an API key: requests and tokens in total since it started,
    and running requests.
    """

    key: Annotated[str, Meta(max_length=64)]
    requests: Annotated[int, Meta(ge=0, lt=1 << 62)]
    tokens: Annotated[int, Meta(gt=-(1 << 62), lt=1 << 62)]
    inflight: Annotated[int, Meta(ge=0, lt=1 << 31)]


RequestEvent = Sent | Begun | Grew | Ended

# Which part of a full report of open requests a message is: none, the first, one between, the last,
# or first and last at once.
Retelling = Literal["", "first", "more", "last", "only"]


class Message(msgspec.Struct, frozen=True, array_like=True):
    """One message of a replica to its peers."""

    version: int
    number: Annotated[int, Meta(ge=0, lt=1 << 62)]
    open_requests: Annotated[int, Meta(ge=0)]  # at workers, after all of this
    retelling: Retelling
    wants: tuple[Name, ...]  # peers that must report all open requests again
    events: tuple[RequestEvent, ...]
    used: tuple[Used, ...] = ()  # with the first message of a retelling: of all keys
    kv: tuple[KvMessage, ...] = ()


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)


def encoded(message: Message) -> bytes:
    """Return the message as bytes."""
    return _ENCODER.encode(message)


def decoded(payload: bytes) -> Message:
    """Return the message in a payload. Raises ValueError that says what is wrong with the
    payload.
    """
    try:
        message = _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error
    if message.version != VERSION:
        raise ValueError(f"version {message.version} of messages, this router speaks {VERSION}")
    for one in message.events:
        if type(one) is Sent:
            _check(one)
    return message


def _check(sent: Sent) -> None:
    if not sent.uncached_tokens <= sent.prompt_tokens:
        raise ValueError(f"{sent.uncached_tokens} uncached of {sent.prompt_tokens} tokens")
    for _, chain in sent.chains:
        if len(chain) % _HASH_BYTES:
            raise ValueError("a torn chain of hashes")
