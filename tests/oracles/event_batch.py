"""The plain-Python oracle of the native `EventBatch`, with a pull parser of msgpack."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.oracles.index import data_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer


Kind = Literal["int", "nil", "bool", "float", "str", "bin", "array", "map", "ext"]


class Header(NamedTuple):
    """What begins at a place. `size`: bytes that follow, or elements, or pairs of a map."""

    kind: Kind
    value: int = 0  # of an int
    size: int = 0


# First byte -> kind, struct code of the number that follows it, and for ext the extra type byte.
_NUMBERS: dict[int, tuple[Kind, str]] = {
    0xC4: ("bin", ">B"),
    0xC5: ("bin", ">H"),
    0xC6: ("bin", ">I"),
    0xC7: ("ext", ">B"),
    0xC8: ("ext", ">H"),
    0xC9: ("ext", ">I"),
    0xCC: ("int", ">B"),
    0xCD: ("int", ">H"),
    0xCE: ("int", ">I"),
    0xCF: ("int", ">Q"),
    0xD0: ("int", ">b"),
    0xD1: ("int", ">h"),
    0xD2: ("int", ">i"),
    0xD3: ("int", ">q"),
    0xD9: ("str", ">B"),
    0xDA: ("str", ">H"),
    0xDB: ("str", ">I"),
    0xDC: ("array", ">H"),
    0xDD: ("array", ">I"),
    0xDE: ("map", ">H"),
    0xDF: ("map", ">I"),
}


class Reader:
    """Reads `data` from `at` on. Raises ValueError where it ends early or is no msgpack."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def header(self) -> Header:
        """The header here; goes past it, and past the eight bytes of a float at most."""
        first = self._number(">B")
        if first < 0x80:
            return Header("int", first)
        if first >= 0xE0:
            return Header("int", first - 256)
        if first < 0xC0:
            if first >= 0xA0:
                return self._sized("str", first & 0x1F)
            return self._sized("array" if first >= 0x90 else "map", first & 0x0F)
        if first == 0xC0:
            return Header("nil")
        if first in (0xC2, 0xC3):
            return Header("bool", first & 1)
        if first in (0xCA, 0xCB):
            self.take(4 if first == 0xCA else 8)
            return Header("float")
        if 0xD4 <= first <= 0xD8:
            return self._sized("ext", (1 << (first - 0xD4)) + 1)
        if first not in _NUMBERS:
            raise ValueError("byte 0xc1 begins no msgpack value")
        kind, code = _NUMBERS[first]
        number = self._number(code)
        if kind == "int":
            return Header("int", number)
        return self._sized(kind, number + (kind == "ext"))

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        if size > len(self.data) - self.at:
            raise ValueError("it ends within a value")
        self.at += size
        return self.data[self.at - size : self.at]

    def skip(self) -> None:
        """Go past one value, whatever it holds."""
        values = 1
        while values:
            values -= 1
            kind, _, size = self.header()
            if kind in ("str", "bin", "ext"):
                self.take(size)
            elif kind in ("array", "map"):
                values += size * (1 + (kind == "map"))
                if values > len(self.data) - self.at:
                    raise ValueError("it ends within a value")

    def _sized(self, kind: Kind, size: int) -> Header:
        """Whatever it promises must be there: each element takes a byte at least."""
        least = 2 * size if kind == "map" else size
        if least > len(self.data) - self.at:
            raise ValueError("it ends within a value")
        return Header(kind, 0, size)

    def _number(self, code: str) -> int:
        (number,) = struct.unpack(code, self.take(struct.calcsize(code)))
        return int(number)


def read_images(reader: Reader, counted: Callable[[bytes], bytes]) -> tuple[list[bytes], bool]:
    """(the bytes to hash for each image, whether one was of no known shape).

    One block's list of maps with `hash` and `start_offset`, or nil. Format: NVIDIA TensorRT-LLM,
    KV event publisher, 2026-08. `counted` is told each image, and raises ValueError for too much.
    """
    start = reader.at
    outer = reader.header()
    parts: list[bytes] = []
    odd = outer.kind not in ("array", "nil")
    if odd:
        reader.at = start
        reader.skip()
    for _ in range(outer.size if outer.kind == "array" else 0):
        start = reader.at
        item = reader.header()
        if item.kind != "map":
            reader.at = start
            reader.skip()
            odd = True
            continue
        part = _image(reader, item.size)
        if part is None:
            odd = True
        else:
            parts.append(counted(part))
    return parts, odd


def _image(reader: Reader, pairs: int) -> bytes | None:
    """Its hash as it is written, then its offset. Of a key given twice, the last counts."""
    image: bytes | None = None
    offset: bytes | None = bytes(4)
    odd = False
    for _ in range(pairs):
        key = _key(reader)
        start = reader.at
        value = reader.header()
        if key == b"hash" and value.kind in ("str", "bin"):
            image = reader.take(value.size)
            continue
        if key == b"start_offset":
            offset = offset_of(value)
            odd |= offset is None
        reader.at = start
        reader.skip()
    return None if odd or image is None or offset is None else image + offset


def _key(reader: Reader) -> bytes:
    """A map's next key; empty where it is no string."""
    start = reader.at
    name = reader.header()
    if name.kind == "str":
        return reader.take(name.size)
    reader.at = start
    reader.skip()
    return b""


def offset_of(header: Header) -> bytes | None:
    """An image's place in its block, 4 bytes; None for what is no int32."""
    if header.kind != "int" or not -(2**31) <= header.value < 2**31:
        return None
    return header.value.to_bytes(4, "little", signed=True)


MAX_BLOCKS = 1 << 20  # of one batch, as the next two
MAX_TOKENS = 1 << 23
MAX_EXTRA_BYTES = 1 << 22
MAX_HASH_BYTES = 64

_TIERS = {
    b"GPU": 0,
    b"CPU": 1,
    b"CPU_PINNED": 1,
    b"DISK": 2,
    b"STORAGE": 2,
    b"EXTERNAL": 2,
}
_STORED = (
    b"block_hashes",
    b"parent_block_hash",
    b"token_ids",
    b"block_size",
    b"lora_id",
    b"medium",
    b"lora_name",
    b"extra_keys",
    b"group_idx",
    b"kv_cache_spec_kind",
)
_REMOVED = (b"block_hashes", b"medium", b"group_idx")
FIELDS = {b"BlockStored": _STORED, b"BlockRemoved": _REMOVED, b"AllBlocksCleared": ()}
"""Fields by tag, as they stand in the array form. Those that mean nothing to us are left out."""


class Fields:
    """Reads the fields of one event after another; `open` goes to the next. Lifetime: batch.

    Members take the event's field by its place, whatever the order on the wire. An absent field
    and nil mean the same. ValueError for a value that the field cannot have.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._at: dict[bytes, int] = {}
        self._blocks = 0
        self._tokens = 0
        self._extra_bytes = 0

    def open(self) -> bytes:
        """The tag of the event here; goes past the event. Of a key given twice, the last counts."""
        reader = self._reader
        outer = reader.header()
        self._at = {}
        if outer.kind == "array" and outer.size:
            tag = self._tag()
            names = FIELDS.get(tag, ())
            for position in range(outer.size - 1):
                if position < len(names):
                    self._at[names[position]] = reader.at
                reader.skip()
            return tag
        if outer.kind != "map":
            raise ValueError("must be an array or a map with its type")
        for _ in range(outer.size):
            start = reader.at
            key = reader.header()
            if key.kind == "str":
                name = reader.take(key.size)
                self._at[name] = reader.at
            else:
                reader.at = start
                reader.skip()
            reader.skip()
        end = reader.at
        reader.at = self._at.get(b"type", end)
        if b"type" not in self._at:
            raise ValueError("must be an array or a map with its type")
        tag = self._tag()
        reader.at = end
        return tag

    def hashes(self) -> npt.NDArray[np.uint64]:
        """Names of blocks, uint64."""
        header = self._field("block_hashes")
        if header is None or header.kind != "array":
            raise ValueError("block_hashes must be an array of hashes")
        self._blocks += header.size
        if self._blocks > MAX_BLOCKS:
            raise ValueError(f"block_hashes: more than {MAX_BLOCKS} blocks in one batch")
        names = [self._hash(self._reader.header(), "block_hashes") for _ in range(header.size)]
        return np.array(names, dtype=np.uint64)

    def parent(self) -> int | None:
        """Name of the block before the first one."""
        header = self._field("parent_block_hash")
        return None if header is None else self._hash(header, "parent_block_hash")

    def tokens(self) -> npt.NDArray[np.int32] | None:
        """Token ids; None if one of them is a pair or a string."""
        header = self._field("token_ids")
        if header is None:
            return np.empty(0, dtype=np.int32)
        if header.kind != "array":
            raise ValueError("token_ids must be an array of ints")
        self._tokens += header.size
        if self._tokens > MAX_TOKENS:
            raise ValueError(f"token_ids: more than {MAX_TOKENS} tokens in one batch")
        tokens = []
        odd = wrong = False
        for _ in range(header.size):
            start = self._reader.at
            kind, value, _size = self._reader.header()
            odd |= kind in ("array", "str")
            wrong |= kind not in ("int", "array", "str") or not 0 <= value < 2**31
            tokens.append(value)
            self._reader.at = start
            self._reader.skip()
        if odd:
            return None
        if wrong:
            raise ValueError("token_ids: a token must be an int in 0..2147483647")
        return np.array(tokens, dtype=np.int32)

    def small(self, field: str, least: int, most: int) -> int | None:
        """An int within both limits."""
        header = self._field(field)
        if header is None:
            return None
        if header.kind != "int" or not least <= header.value <= most:
            raise ValueError(f"{field} must be {least}..{most} or nil")
        return header.value

    def lora_id(self) -> int:
        """The adapter's number; 0 is none."""
        header = self._field("lora_id")
        if header is not None and header.kind != "int":
            raise ValueError("lora_id must be an int or nil")
        return 0 if header is None else header.value

    def tier(self) -> int | None:
        """0 gpu, 1 host, 2 disk; None for a medium we do not know."""
        medium = self.text("medium")
        return 0 if medium is None else _TIERS.get(medium)

    def text(self, field: str) -> bytes | None:
        """A string, as the bytes it has on the wire."""
        header = self._field(field)
        if header is None:
            return None
        if header.kind != "str":
            raise ValueError(f"{field} must be a string or nil")
        return self._utf8(header.size, field)

    def extra_keys(
        self, blocks: int, lora_name: bytes | None, at_root: bool
    ) -> tuple[tuple[bytes, ...] | None, bytes | None]:
        """(what each block's identity holds besides its tokens, the salt among it).

        None for the first where a key has a shape we do not know. `at_root`: block 0 is the first
        of its prompt, and the salt is not said elsewhere; then its last bare string is the salt.
        A bare string equal to `lora_name` is the adapter. Further ones identify images (vLLM
        0.18), as [identifier, offset] does from 0.20 on; bytes are digests of embeddings.
        """
        header = self._field("extra_keys")
        if header is None:
            return (), None
        if header.kind != "array":
            raise ValueError("extra_keys must be an array or nil")
        extras = [b""] * blocks
        salt: bytes | None = None
        odd = False
        for block in range(header.size):
            parts, bare, strange = self._entry(lora_name)
            odd |= strange
            if block == 0 and at_root and bare is not None:
                salt = parts.pop(bare)[:-4]
            if block < blocks:
                extras[block] = b"".join(parts)
        if odd:
            return None, salt
        return (tuple(extras) if any(extras) else ()), salt

    def mm_keys(self, extras: tuple[bytes, ...], blocks: int) -> tuple[bytes, ...] | None:
        """`extras` with TensorRT-LLM's images behind them; None for an image of unknown shape."""
        header = self._field("mm_keys")
        if header is None:
            return extras
        if header.kind != "array":
            raise ValueError("mm_keys must be an array or nil")
        joined = list(extras) or [b""] * blocks
        odd = False
        for block in range(header.size):
            parts, strange = read_images(self._reader, self._counted)
            odd |= strange
            if block < blocks:
                joined[block] += b"".join(parts)
        if odd:
            return None
        return tuple(joined) if any(joined) else ()

    def _entry(self, lora_name: bytes | None) -> tuple[list[bytes], int | None, bool]:
        """One block's keys as the bytes to hash, the place of its last bare string, and whether
        a key was of no known shape."""
        reader = self._reader
        start = reader.at
        entry = reader.header()
        parts: list[bytes] = []
        bare: int | None = None
        odd = entry.kind not in ("array", "nil")
        if odd:
            reader.at = start
            reader.skip()
        for _ in range(entry.size if entry.kind == "array" else 0):
            start = reader.at
            item = reader.header()
            if item.kind == "str":
                text = self._utf8(item.size, "extra_keys")
                if text == lora_name:
                    lora_name = None
                    continue
                bare = len(parts)
                parts.append(self._counted(text + bytes(4)))
                continue
            part = self._identified(item)
            if part is None:
                odd = True
                reader.at = start
                reader.skip()
            else:
                parts.append(self._counted(part))
        return parts, bare, odd

    def _identified(self, item: Header) -> bytes | None:
        """The bytes to hash for a digest, or for [identifier] or [identifier, offset]."""
        reader = self._reader
        if item.kind == "bin":
            return reader.take(item.size) + bytes(4)
        if item.kind != "array" or not 1 <= item.size <= 2:
            return None
        identifier = reader.header()
        if identifier.kind not in ("str", "bin"):
            return None
        part = reader.take(identifier.size)
        if item.size == 1:
            return part + bytes(4)
        offset = offset_of(reader.header())
        return None if offset is None else part + offset

    def _counted(self, part: bytes) -> bytes:
        self._extra_bytes += len(part)
        if self._extra_bytes > MAX_EXTRA_BYTES:
            raise ValueError(f"extra_keys: more than {MAX_EXTRA_BYTES} bytes in one batch")
        return part

    def _tag(self) -> bytes:
        header = self._reader.header()
        if header.kind != "str":
            raise ValueError("must be an array or a map with its type")
        return self._reader.take(header.size)

    def _field(self, field: str) -> Header | None:
        if field.encode() not in self._at:
            return None
        self._reader.at = self._at[field.encode()]
        header = self._reader.header()
        return None if header.kind == "nil" else header

    def _hash(self, header: Header, field: str) -> int:
        """vLLM's own way to shorten a digest: its last 8 bytes, big-endian."""
        if header.kind == "int":
            return header.value % 2**64
        if header.kind != "bin" or not 1 <= header.size <= MAX_HASH_BYTES:
            raise ValueError(f"{field}: a hash must be an int or 1..{MAX_HASH_BYTES} bytes")
        return int.from_bytes(self._reader.take(header.size)[-8:], "big")

    def _utf8(self, size: int, field: str) -> bytes:
        text = self._reader.take(size)
        try:
            text.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{field} must be UTF-8") from None
        return text


MAX_PAYLOAD_BYTES = 32 << 20  # one batch; a full 131k-token prompt is about 0.7 MB
MAX_EVENTS = 1 << 16  # of one batch
MAX_BLOCK_SIZE = 1 << 16  # tokens a block
MAX_RANK = (1 << 16) - 1  # and the highest cache group

# What vLLM calls groups whose every leading block a hit needs (`v1/kv_cache_interface.py`, 0.22).
_FULL_ATTENTION = (b"full_attention", b"mla_attention", b"sink_full_attention")


class EventBatch:
    """One decoded batch, all of it or nothing; lifetime: call to feed.

    `blocks` counts the stored ones, `len` the events that can be used, `skipped` the well formed
    others: of an unknown type or medium, with tokens that are not plain ints (bigrams, strings) or
    not blocks x block_size of them, or with extra keys of an unknown shape. Names are uint64: ints
    modulo 2^64, digests by their last 8 bytes, big-endian.
    Raises TypeError for a payload that is no buffer of bytes, ValueError with the reason for bytes
    that are malformed or beyond a limit of this module.
    """

    def __init__(self, payload: Buffer) -> None:
        data = data_bytes(payload, "payload")
        if len(data) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"event batch: {len(data)} bytes, at most {MAX_PAYLOAD_BYTES}")
        self.ts_s = 0.0
        self.rank = 0
        self.skipped = 0
        self.blocks = 0
        self._events: list[tuple[Any, ...]] = []
        try:
            self._read(Reader(data))
        except ValueError as error:
            raise ValueError(f"event batch: {error}") from None

    def __len__(self) -> int:
        return len(self._events)

    def listed(self) -> list[tuple[Any, ...]]:
        """The events, in order, each one of these tuples:

        ("stored", names, parent, tokens, block_size, tier, lora_name, salt, extras, group,
        full_attention): a chain of blocks. `names` uint64; `parent` the name before the first, or
        None; `tokens` int32, empty where they are only named (offload tiers); `tier` 0 gpu, 1
        host, 2 disk; `extras` bytes to hash after the tokens of each block, () where no block has
        any; `group` a hybrid model's cache group or None, and whether it is told to be one of
        full attention;
        ("removed", names, tier, group); ("cleared",).
        """
        return list(self._events)

    def _read(self, reader: Reader) -> None:
        envelope = reader.header()
        if envelope.kind != "array" or envelope.size < 2:
            raise ValueError("must be an array [time, events, rank]")
        start = reader.at
        time = reader.header()
        if time.kind not in ("int", "float"):
            raise ValueError("the time must be a number")
        is_int = time.kind == "int"
        self.ts_s = float(time.value) if is_int else _float(reader.data[start : reader.at])
        events = reader.header()
        if events.kind != "array" or events.size > MAX_EVENTS:
            raise ValueError(f"the events must be an array of at most {MAX_EVENTS}")
        fields = Fields(reader)
        for position in range(events.size):
            try:
                self._read_event(reader, fields)
            except ValueError as error:
                raise ValueError(f"event {position}: {error}") from None
        if envelope.size > 2:
            self.rank = _rank(reader)
        for _ in range(3, envelope.size):
            reader.skip()
        if reader.at != len(reader.data):
            raise ValueError("more bytes follow it")

    def _read_event(self, reader: Reader, fields: Fields) -> None:
        tag = fields.open()
        end = reader.at
        event: tuple[Any, ...] | None = None
        if tag == b"BlockStored":
            event = self._stored(fields)
        elif tag == b"BlockRemoved":
            event = _removed(fields)
        elif tag in FIELDS:
            event = ("cleared",)
        reader.at = end
        if event is None:
            self.skipped += 1
        else:
            self._events.append(event)

    def _stored(self, fields: Fields) -> tuple[Any, ...] | None:
        names = fields.hashes()
        parent = fields.parent()
        tokens = fields.tokens()
        block_size = fields.small("block_size", 1, MAX_BLOCK_SIZE) or 1
        lora_id = fields.lora_id()
        tier = fields.tier()
        lora_name = fields.text("lora_name")
        salt = fields.text("cache_salt")
        group = fields.small("group_idx", 0, MAX_RANK)
        kind = fields.text("kv_cache_spec_kind")
        if lora_name is None and lora_id:  # vLLM until 0.13: nameless, but never the base model
            lora_name = b"lora_id:%d" % lora_id
        at_root = parent is None and salt is None
        extras, keyed_salt = fields.extra_keys(len(names), lora_name, at_root)
        salt = salt if keyed_salt is None else keyed_salt
        extras = _both(extras, fields.mm_keys(extras or (), len(names)))
        if tokens is None or tier is None or extras is None:
            return None
        if len(tokens) and len(tokens) != len(names) * block_size:
            return None
        self.blocks += len(names)
        lora = None if lora_name is None else lora_name.decode()
        salted = None if salt is None else salt.decode()
        full_attention = kind in _FULL_ATTENTION
        return (
            *("stored", names, parent, tokens, block_size, tier),
            *(lora, salted, extras, group, full_attention),
        )


def _both(
    extras: tuple[bytes, ...] | None, joined: tuple[bytes, ...] | None
) -> tuple[bytes, ...] | None:
    """Those of `extra_keys` and `mm_keys`, where both can be used."""
    return None if extras is None else joined


def _removed(fields: Fields) -> tuple[Any, ...] | None:
    names = fields.hashes()
    tier = fields.tier()
    group = fields.small("group_idx", 0, MAX_RANK)
    return None if tier is None else ("removed", names, tier, group)


def _rank(reader: Reader) -> int:
    rank = reader.header()
    if rank.kind == "nil":
        return 0
    if rank.kind != "int" or not 0 <= rank.value <= MAX_RANK:
        raise ValueError(f"the rank must be 0..{MAX_RANK} or nil")
    return rank.value


def _float(value: bytes) -> float:
    (number,) = struct.unpack(">f" if len(value) == 5 else ">d", value[1:])
    return float(number)
