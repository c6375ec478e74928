"""What replicas say to each other of workers' KV events (`docs/reference/wire.md`).

One replica reads a worker's events; those that it applied in order are told to all others, numbered
without a gap. Whoever misses one says so (`KvWanted`) and gets a copy of all that the reader knows.
A token is the fencing token of the lease by which a replica reads: of two the greater one counts.

Of a worker whose events each replica reads for itself, one that lacks some asks another one for a
copy (`KvAsked`); what it gets has the token `UNREAD`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

PIECE_BYTES = 64 << 10
MAX_BATCH_PIECES = 64  # what is longer is told by a copy
MAX_COPY_PIECES = 1 << 12  # 15 million blocks
UNREAD = 0  # a token that no lease has: nobody reads this worker for others

_Name = Annotated[str, Meta(max_length=2_048)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Seq = Annotated[int, Meta(ge=-1, lt=1 << 62)]
_Digest = Annotated[int, Meta(ge=0)]  # msgpack has nothing above 64 bits
_Body = Annotated[bytes, Meta(max_length=PIECE_BYTES)]
_Piece = Annotated[int, Meta(ge=0, lt=MAX_COPY_PIECES)]
_Pieces = Annotated[int, Meta(ge=1, le=MAX_COPY_PIECES)]


class KvHead(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """I read this worker; `number` is the next batch to be told.

    `first`: the number with which I began, where another reader, or I, had got to (`after_token`,
    `after_number`): who knew all until there need not ask. No such place: both are 0.
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


class KvCopy(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """A piece of all that is known of a worker's cache before the batch `number`."""

    worker: _Name
    token: _Number
    number: _Number
    next_seq: _Number
    live_seq: _Seq
    digest: _Digest
    exact: bool
    turned_over: bool
    piece: _Piece
    pieces: _Pieces
    body: _Body


class KvWanted(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """Whoever reads this worker: I know all before this batch, or, at 0, nothing."""

    worker: _Name
    token: _Number
    number: _Number


class KvAsked(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """`peer`: tell all that you know of this worker, whose events each of us reads for itself."""

    worker: _Name
    peer: _Name


class KvNone(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    """Whoever asked me for this worker: I do not know all of it."""

    worker: _Name


KvSaid = KvHead | KvBatch | KvCopy | KvWanted | KvAsked | KvNone

_WORD_BYTES = 96


def size_of(said: KvSaid) -> int:
    """Bytes of it in a message, by a rough count."""
    body = len(said.body) if type(said) in (KvBatch, KvCopy) else 0  # type: ignore[union-attr]
    return _WORD_BYTES + len(said.worker) + body


def pieces_of(body: bytes) -> list[bytes]:
    """One at least."""
    starts = range(0, max(len(body), 1), PIECE_BYTES)
    return [body[start : start + PIECE_BYTES] for start in starts]
