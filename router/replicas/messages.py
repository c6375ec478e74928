"""The messages between replicas, as msgpack arrays (`docs/wire.md`).

One replica reads a worker's events; those that it applied in order are told to all others, numbered
without a gap. Whoever misses one says so (`KvWanted`) and gets a copy of all that the reader knows.
A token is the fencing token of the lease by which a replica reads: of two the greater one counts.

Of a worker whose events each replica reads for itself, one that lacks some asks another one for a
copy (`KvAsked`); what it gets has the token `UNREAD`.

A message is [version, number, open requests, retelling, wanted peers, [what happened...], [what was
used of keys...], [what is said of KV events (`kv_messages.py`)...]]. What happened is told in the
order in which it did. Messages are numbered from 0 without a gap, so that whoever misses one knows
it; then it asks (`wants`), and all that is open is told anew.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np
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


VERSION = 1

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
    """A request was charged to a worker. `chains`: (block size, uint64s in little-endian bytes)."""

    request_id: RequestId
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


class Begun(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """Its first token came."""

    request_id: RequestId


class Grew(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """Its answer has so many tokens by now."""

    request_id: RequestId
    output_tokens: Tokens


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """It is at its worker no more; `answered` with these tokens, as the worker counted them."""

    request_id: RequestId
    answered: bool = False
    prompt_tokens: Tokens | None = None
    cached_tokens: Tokens | None = None
    output_tokens: Tokens | None = None


class Used(msgspec.Struct, frozen=True, array_like=True):
    """What its requests used of a key, in all since it began, and how many are in flight."""

    key: Annotated[str, Meta(max_length=64)]
    requests: Annotated[int, Meta(ge=0, lt=1 << 62)]
    tokens: Annotated[int, Meta(gt=-(1 << 62), lt=1 << 62)]
    inflight: Annotated[int, Meta(ge=0, lt=1 << 31)]


Happened = Sent | Begun | Grew | Ended

# Of all that is open, told anew: not a part of it, its first message, one between, the last one,
# or both first and last.
Retelling = Literal["", "first", "more", "last", "only"]


class Message(msgspec.Struct, frozen=True, array_like=True):
    """One message of a replica."""

    version: int
    number: Annotated[int, Meta(ge=0, lt=1 << 62)]
    open_requests: Annotated[int, Meta(ge=0)]  # at workers, after all of this
    retelling: Retelling
    wants: tuple[Name, ...]  # peers that shall tell anew
    happened: tuple[Happened, ...]
    used: tuple[Used, ...] = ()  # with the first message of a retelling: of all keys
    kv: tuple[KvSaid, ...] = ()


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)


def encoded(message: Message) -> bytes:
    """The message as it is sent."""
    return _ENCODER.encode(message)


def decoded(payload: bytes) -> Message:
    """The message in a payload. Raises ValueError, which says what is wrong with it."""
    try:
        message = _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error
    if message.version != VERSION:
        raise ValueError(f"version {message.version} of messages, this router speaks {VERSION}")
    for one in message.happened:
        if type(one) is Sent:
            _check(one)
    return message


def _check(sent: Sent) -> None:
    if not sent.uncached_tokens <= sent.prompt_tokens:
        raise ValueError(f"{sent.uncached_tokens} uncached of {sent.prompt_tokens} tokens")
    for _, chain in sent.chains:
        if len(chain) % _HASH_BYTES:
            raise ValueError("a torn chain of hashes")
