"""The messages between two workers about a prompt's KV, and the parameters that a router passes
between them.

A frame is four bytes of length, little-endian, and a msgpack map; the bytes of a `Part` follow it.
The reader connects when its request arrives:

    Hello -> Welcome | Refusal, then any number of Beats, one Read -> Parts, Done, then Release

If either side closes the connection early, the KV is freed, because it is not kept for a dead
reader.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

PART_BYTES = 4 << 20  # of KV sent at once, about
VERSION = 1  # of these messages
MAX_FRAME_BYTES = 16 << 20  # a welcome names each block of a long prompt
MAX_PART_BYTES = 64 << 20
MODE = "warmroute"  # `transfer_mode`: its readers speak this protocol

_Name = Annotated[str, Meta(max_length=512)]
_Port = Annotated[int, Meta(ge=0, le=65_535)]
_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Refused = Literal["version", "engine", "unknown", "prompt", "in_use", "busy", "model"]


class TransferParams(msgspec.Struct, frozen=True):
    """The `kv_transfer_params` of vLLM's NixlConnector (0.33), read and written. Lifetime: request.

    A router passes on what one worker wrote. Unknown keys are ignored; missing keys mean that the
    prompt is computed here. `transfer_mode` says that our engine wrote them.
    """

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    remote_engine_id: _Name | None = None
    remote_block_ids: list[Any] | None = None  # for vLLM's readers; our readers get them by Welcome
    remote_host: _Name | None = None
    remote_port: _Port | None = None
    remote_request_id: _Name | None = None
    remote_num_tokens: _Number | None = None
    remote_prefill_cached_tokens: _Number | None = None
    remote_registration_generation: _Number | None = None
    tp_size: _Number | None = None
    pp_size: _Number | None = None
    transfer_mode: _Name | None = None
    transfer_id: _Name | None = None  # of KV to be kept: by which a router can give it back

    @property
    def lacks(self) -> str | None:
        """The reason why nothing can be read with these parameters; None if a read can be tried."""
        if self.transfer_mode != MODE:
            return "foreign"
        needed = (
            *(self.remote_engine_id, self.remote_host, self.remote_port, self.remote_request_id),
            *(self.remote_num_tokens, self.remote_registration_generation),
        )
        if None in needed or not str(self.remote_request_id).isdecimal():
            return "incomplete"
        return None


class Form(msgspec.Struct, frozen=True):
    """The properties of KV that both workers must share. `model` is a digest of all that a token's
    KV depends on.
    """

    model: _Name
    layers: int
    heads: int  # of K and V, in the whole model
    row_bytes: int  # of one token's K or V of one head
    dtype: _Name
    scale_bytes: int = 0  # a row; 0: rows have no scale


class Pool(msgspec.Struct, frozen=True):
    """The KV pool of one rank of a worker, as `kvkernels.ops.relayout.PoolLayout` describes it."""

    layers: tuple[int, int]
    heads: tuple[int, int]
    blocks: int
    order: tuple[str, ...]
    file: _Name  # its memory, which other processes of this host may map
    scales_file: _Name = ""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The reader's first message: it names the KV that it wants, and the pool that it will put it
    into.
    """

    engine_id: _Name
    request_id: int
    generation: int
    tokens: int
    prompt: int  # digest of the tokens, as the reader has them
    form: Form
    version: int = VERSION


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The reply to a `Hello`, with which one worker asks another worker for a prompt's KV.

    The worker that has the KV sends it, and then waits for a `ReadTokens`.
    """

    block_tokens: int
    lease_s: float
    block_ids: list[int] = []  # where there are pools: the prompt's blocks in each
    pools: list[Pool] = []  # of each rank; empty: its memory is its own


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Tells the reader that nothing can be read; `message` is for people."""

    reason: Refused
    message: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The reader's sign of life: its request still waits."""


class ReadTokens(msgspec.Struct, frozen=True, tag="read"):
    """The reader's message that it has room, and asks for the KV of tokens `start`..`stop`; or it
    copies them out of the pools itself, and sends `Copied` at the end.
    """

    start: int
    stop: int
    is_mapped: bool = False


class Part(msgspec.Struct, frozen=True, tag="part"):
    """A message with KV of the prompt's blocks `start`..`stop`; the bytes of the KV follow it."""

    start: int
    stop: int
    size: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Tells the reader that all KV is sent. `valid` is True if until now the blocks were those of
    this prompt.
    """

    valid: bool
    sent_bytes: int


class Copied(msgspec.Struct, frozen=True, tag="copied"):
    """The reader's message that it has copied KV from mapped memory, and asks whether the KV was
    valid.
    """


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The reader's message that it no longer needs the KV. Alone on a connection, with all three
    fields, it says that nobody will read the KV.
    """

    engine_id: _Name = ""
    request_id: int = 0
    generation: int = 0


class Place(NamedTuple):
    """The place for the KV of a prompt's tokens `start`..`stop`: all blocks of the prompt in order.
    Lifetime: read.
    """

    block_ids: Sequence[int]
    start: int
    stop: int


Message = Hello | Welcome | Refusal | Beat | ReadTokens | Part | Done | Copied | Release
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
_LENGTH = struct.Struct("<I")


class BadMessage(Exception):  # noqa: N818 - what arrived
    """Raised for bytes that are no message, or for a message that is not allowed at this point."""


def frame(message: Message) -> bytes:
    """Return the bytes of a message."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


async def receive(stream: asyncio.StreamReader) -> Message:
    """Return the next message. Raises BadMessage, or IncompleteReadError if the other end closed
    the connection.
    """
    (size,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
    if size > MAX_FRAME_BYTES:
        raise BadMessage(f"a message of {size} bytes")
    try:
        message: Message = _decoder.decode(await stream.readexactly(size))
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadMessage(str(error)) from error
    return message
