"""What replicas say to each other, as msgpack arrays (`docs/reference/wire.md`).

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

from router.replicas.kv_messages import KvSaid

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
