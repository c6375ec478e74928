"""What two workers say to each other about a prompt's KV, and what a router carries between them.

A frame is four bytes of length, little-endian, and a msgpack map; the bytes of a `Part` follow it
as they are. The reader connects when its request arrives:

    Hello -> Welcome | Refusal, then any number of Beats, one Read -> Parts, Done, then Release

Whoever closes the connection early frees the KV: a reader that dies needs nobody to wait for it.
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
MODE = "warmroute"  # `transfer_mode`: who reads it speaks as above

_Name = Annotated[str, Meta(max_length=512)]
_Port = Annotated[int, Meta(ge=0, le=65_535)]
_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Refused = Literal["version", "engine", "unknown", "prompt", "in_use", "busy", "model"]


class TransferParams(msgspec.Struct, frozen=True):
    """`kv_transfer_params` of vLLM's NixlConnector (0.33), read and written. Lifetime: request.

    A router passes on what one worker wrote. Unknown keys are ignored, missing ones mean that the
    prompt is computed here. Ours tell who wrote them by `transfer_mode`.
    """

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    remote_engine_id: _Name | None = None
    remote_block_ids: list[Any] | None = None  # vLLM's readers need them; ours are told by Welcome
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
        """Why nothing can be read by them; None: it can be tried."""
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
    """What must be equal at both ends. `model` is a digest of all that a token's KV depends on."""

    model: _Name
    layers: int
    heads: int  # of K and V, in the whole model
    row_bytes: int  # of one token's K or V of one head
    dtype: _Name
    scale_bytes: int = 0  # a row; 0: rows have no scale


class Pool(msgspec.Struct, frozen=True):
    """What one rank of a worker holds, as `kvkernels.ops.relayout.PoolLayout` has it."""

    layers: tuple[int, int]
    heads: tuple[int, int]
    blocks: int
    order: tuple[str, ...]
    file: _Name  # its memory, which others of this host may map
    scales_file: _Name = ""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The reader names what it wants, and what it would put it into."""

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
    """Nothing can be read; `message` is for people."""

    reason: Refused
    message: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The reader lives, and its request waits."""


class ReadTokens(msgspec.Struct, frozen=True, tag="read"):
    """The reader has room: send the KV of tokens `start`..`stop`; or it is being copied out of the
    pools, which `Copied` ends."""

    start: int
    stop: int
    is_mapped: bool = False


class Part(msgspec.Struct, frozen=True, tag="part"):
    """KV of the prompt's blocks `start`..`stop`, as many bytes as follow."""

    start: int
    stop: int
    size: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """All is sent. `valid`: the blocks were this prompt's all the time until now."""

    valid: bool
    sent_bytes: int


class Copied(msgspec.Struct, frozen=True, tag="copied"):
    """The reader has copied what it mapped: was it valid?"""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The reader needs it no longer; alone on a connection, with all three, nobody will read it."""

    engine_id: _Name = ""
    request_id: int = 0
    generation: int = 0


class Place(NamedTuple):
    """Where the KV of a prompt's tokens `start`..`stop` goes: all blocks of the prompt, the first
    one first. Lifetime: read."""

    block_ids: Sequence[int]
    start: int
    stop: int


Message = Hello | Welcome | Refusal | Beat | ReadTokens | Part | Done | Copied | Release
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
_LENGTH = struct.Struct("<I")


class BadMessage(Exception):  # noqa: N818 - what arrived
    """What arrived is no message, or not the one that may come now."""


def frame(message: Message) -> bytes:
    """The bytes to send."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


async def receive(stream: asyncio.StreamReader) -> Message:
    """The next message. Raises BadMessage, and IncompleteReadError where the other end closed."""
    (size,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
    if size > MAX_FRAME_BYTES:
        raise BadMessage(f"a message of {size} bytes")
    try:
        message: Message = _decoder.decode(await stream.readexactly(size))
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadMessage(str(error)) from error
    return message
