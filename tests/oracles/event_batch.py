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
    """The header of a msgpack value. `size` counts the bytes that follow, the elements of an array,
    or the pairs of a map.
    """

    kind: Kind
    value: int = 0  # the value of an int
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
    """Reads the msgpack values of `data` from `at` on. Raises ValueError if the data ends early or
    is no msgpack.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def header(self) -> Header:
        """Read the header at this place and move past it; a float's eight bytes are part of it."""
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
        """Return the next `size` bytes."""
        if size > len(self.data) - self.at:
            raise ValueError("it ends within a value")
        self.at += size
        return self.data[self.at - size : self.at]

    def skip(self) -> None:
        """Move past one value, with everything in it."""
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
        """Return a header with a size. Raises ValueError if fewer bytes follow than its elements
        need; each takes at least one.
        """
        least = 2 * size if kind == "map" else size
        if least > len(self.data) - self.at:
            raise ValueError("it ends within a value")
        return Header(kind, 0, size)

    def _number(self, code: str) -> int:
        (number,) = struct.unpack(code, self.take(struct.calcsize(code)))
        return int(number)


class UnusableError(Exception):
    """Raised if an event cannot be used, with the reason `why`; other events of the batch can be
    used.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def read_images(reader: Reader, counted: Callable[[bytes], bytes]) -> list[bytes]:
    """Return the bytes to hash for each image of one block, which is a list of maps with `hash` and
    `start_offset`, or nil.

    Raises UnusableError. The format is that of NVIDIA TensorRT-LLM's KV event publisher, 2026-08.
    `counted` is called with each image.
    """
    outer = reader.header()
    if outer.kind == "nil":
        return []
    if outer.kind != "array":
        raise UnusableError("bad_extra_keys")
    parts: list[bytes] = []
    for _ in range(outer.size):
        item = reader.header()
        if item.kind != "map":
            raise UnusableError("bad_extra_keys")
        parts.append(counted(_image(reader, item.size)))
    return parts


def _image(reader: Reader, pairs: int) -> bytes:
    """Return an image's hash as it is written, then its offset. If a key occurs twice, the last one
    counts.
    """
    image: bytes | None = None
    offset = bytes(4)
    for _ in range(pairs):
        key = _key(reader)
        start = reader.at
        value = reader.header()
        if key == b"hash" and value.kind in ("str", "bin"):
            image = reader.take(value.size)
        elif key == b"start_offset":
            offset = offset_of(value)
        else:
            reader.at = start
            reader.skip()
    if image is None:
        raise UnusableError("bad_extra_keys")
    return image + offset


def _key(reader: Reader) -> bytes:
    """Return a map's next key, or b"" if it is no string."""
    start = reader.at
    name = reader.header()
    if name.kind == "str":
        return reader.take(name.size)
    reader.at = start
    reader.skip()
    return b""


def offset_of(header: Header) -> bytes:
    """Return an image's place in its block as 4 bytes. Raises UnusableError if it is no int32."""
    if header.kind != "int" or not -(2**31) <= header.value < 2**31:
        raise UnusableError("bad_extra_keys")
    return header.value.to_bytes(4, "little", signed=True)


MAX_BLOCKS = 1 << 20  # in one batch; so are the next two
MAX_TOKENS = 1 << 23
MAX_EXTRA_BYTES = 1 << 22
MAX_HASH_BYTES = 64

# Media as engines write them, in any case: vLLM GPU, CPU, STORAGE, in 0.26 FS and OBJ, with
# Mooncake's store "cpu"; SGLang CPU_PINNED, DISK, EXTERNAL; Dynamo's others.
_TIERS = {
    **dict.fromkeys((b"gpu", b"device"), 0),
    **dict.fromkeys((b"cpu", b"cpu_pinned", b"cpu_tier1", b"host", b"host_pinned"), 1),
    **dict.fromkeys((b"cpu_tier2", b"disk", b"storage", b"external"), 2),
    **dict.fromkeys((b"fs", b"obj", b"nvme", b"ssd"), 2),
}
_FAR_TIER = 2  # the tier of blocks in another machine
MAX_MEDIA = 8  # unknown media that a batch names
MAX_MEDIUM_BYTES = 48
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
    b"kv_cache_spec_sliding_window",
)
_REMOVED = (b"block_hashes", b"medium", b"group_idx")
FIELDS = {b"BlockStored": _STORED, b"BlockRemoved": _REMOVED, b"AllBlocksCleared": ()}
"""Fields by tag, as they stand in the array form. Those that mean nothing to us are left out."""


class Fields:
    """Reads the fields of one event after another; `open` moves to the next event. Lifetime: batch.

    The methods find a field whatever the order on the wire. An absent field and nil mean the same.
    They raise UnusableError for a value that the field cannot have. The sums cover the events that
    are used: call `keep` after a used event and `drop` after a skipped one.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._at: dict[bytes, int] = {}
        self.unknown_media: dict[str, int] = {}  # skipped events by their unknown medium
        self._kept = [0, 0, 0]  # blocks, tokens, bytes of extra keys
        self._sums = [0, 0, 0]

    def keep(self) -> None:
        """Add the current event to the sums, because it is used."""
        self._kept = list(self._sums)

    def drop(self) -> None:
        """Remove the current event from the sums, because it is skipped."""
        self._sums = list(self._kept)

    def open(self) -> bytes:
        """Return the tag of the event at this place, or b"" if it has none, and move past the
        event. If a key occurs twice, the last one counts.
        """
        reader = self._reader
        start = reader.at
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
            reader.at = start
            reader.skip()
            return b""
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
        if b"type" not in self._at:
            return b""
        reader.at = self._at[b"type"]
        tag = self._tag()
        reader.at = end
        return tag

    def hashes(self) -> npt.NDArray[np.uint64]:
        """Return the names of the blocks as uint64."""
        header = self._field("block_hashes")
        if header is None or header.kind != "array":
            raise UnusableError("bad_hashes")
        self._count(0, header.size, MAX_BLOCKS)
        names = [self._hash(self._reader.header()) for _ in range(header.size)]
        return np.array(names, dtype=np.uint64)

    def parent(self) -> int | None:
        """Return the name of the block before the first one, or None if the event has none."""
        header = self._field("parent_block_hash")
        return None if header is None else self._hash(header)

    def tokens(self) -> npt.NDArray[np.int32] | npt.NDArray[np.int64]:
        """Return the token ids, as int64 if one of them is beyond int32, like SGLang's stand-ins
        for images.

        Pairs (bigrams), strings (images) and other values are not token ids.
        """
        header = self._field("token_ids")
        if header is None:
            return np.empty(0, dtype=np.int32)
        if header.kind != "array":
            raise UnusableError("bad_tokens")
        self._count(1, header.size, MAX_TOKENS)
        tokens = []
        for _ in range(header.size):
            kind, value, _size = self._reader.header()
            if kind != "int" or not 0 <= value < 2**63:
                raise UnusableError("bad_tokens")
            tokens.append(value)
        is_wide = any(token >= 2**31 for token in tokens)
        return np.array(tokens, dtype=np.int64 if is_wide else np.int32)

    def small(self, field: str, most: int, why: str = "bad_field") -> int | None:
        """Return the integer field, which is 0 to `most`, or None if it is absent. Raises
        UnusableError for other values.
        """
        header = self._field(field)
        if header is None:
            return None
        if header.kind != "int" or not 0 <= header.value <= most:
            raise UnusableError(why)
        return header.value

    def lora_id(self) -> int:
        """Return the adapter's number, or 0 if there is none."""
        header = self._field("lora_id")
        if header is not None and header.kind != "int":
            raise UnusableError("bad_field")
        return 0 if header is None else header.value

    def tier(self) -> int:
        """Return the tier: 0 for the GPU, 1 for the host, 2 for disk or any place that is not local
        to the worker (vLLM 0.27).
        """
        told = self.text("medium", "unknown_medium")
        medium = b"GPU" if told is None else told
        tier = _TIERS.get(medium.lower())
        if tier is None:
            raise self._unknown_medium(medium)
        locality = self.text("locality")
        if locality is None or locality.lower() == b"local":
            return tier
        if tier == 0:  # a GPU of another worker
            raise self._unknown_medium(medium + b" " * bool(locality) + locality)
        return _FAR_TIER

    def _unknown_medium(self, medium: bytes) -> UnusableError:
        name = medium[:MAX_MEDIUM_BYTES].decode(errors="ignore")
        if name not in self.unknown_media and len(self.unknown_media) >= MAX_MEDIA:
            name = ""
        self.unknown_media[name] = self.unknown_media.get(name, 0) + 1
        return UnusableError("unknown_medium")

    def text(self, field: str, why: str = "bad_field") -> bytes | None:
        """Return a string field as the bytes on the wire, or None if it is absent."""
        header = self._field(field)
        if header is None:
            return None
        if header.kind != "str":
            raise UnusableError(why)
        return self._utf8(header.size, why)

    def is_text(self, field: str, texts: tuple[bytes, ...]) -> bool:
        """Return whether the field is one of these strings; no value raises an error."""
        header = self._field(field)
        is_text = header is not None and header.kind == "str"
        return is_text and self._reader.take(header.size) in texts

    def extra_keys(
        self, blocks: int, lora_name: bytes | None, at_root: bool
    ) -> tuple[tuple[bytes, ...], bytes | None]:
        """Return (what each block's identity holds besides its tokens, the salt).

        `at_root` says that block 0 is the first of its prompt and that no other field gives the
        salt; then its last bare string is the salt. A bare string equal to `lora_name` is the
        adapter. Other bare strings identify images (vLLM 0.18), as [identifier, offset] does from
        0.20 on; bytes are digests of embeddings.
        """
        header = self._field("extra_keys")
        if header is None:
            return (), None
        if header.kind != "array":
            raise UnusableError("bad_extra_keys")
        extras = [b""] * blocks
        salt: bytes | None = None
        for block in range(header.size):
            parts, bare = self._entry(lora_name)
            if block == 0 and at_root and bare is not None:
                salt = parts.pop(bare)[:-4]
            if block < blocks:
                extras[block] = b"".join(parts)
        return (tuple(extras) if any(extras) else ()), salt

    def mm_keys(self, extras: tuple[bytes, ...], blocks: int) -> tuple[bytes, ...]:
        """Return `extras` with TensorRT-LLM's images appended to each block's bytes."""
        header = self._field("mm_keys")
        if header is None:
            return extras
        if header.kind != "array":
            raise UnusableError("bad_extra_keys")
        joined = list(extras) or [b""] * blocks
        for block in range(header.size):
            parts = read_images(self._reader, self._counted)
            if block < blocks:
                joined[block] += b"".join(parts)
        return tuple(joined) if any(joined) else ()

    def _entry(self, lora_name: bytes | None) -> tuple[list[bytes], int | None]:
        """Return one block's keys as the bytes to hash, and the place of its last bare string or
        None.
        """
        reader = self._reader
        entry = reader.header()
        parts: list[bytes] = []
        bare: int | None = None
        if entry.kind not in ("array", "nil"):
            raise UnusableError("bad_extra_keys")
        for _ in range(entry.size if entry.kind == "array" else 0):
            item = reader.header()
            if item.kind == "str":
                text = self._utf8(item.size, "bad_extra_keys")
                if text == lora_name:
                    lora_name = None
                    continue
                bare = len(parts)
                parts.append(self._counted(text + bytes(4)))
            else:
                parts.append(self._counted(self._identified(item)))
        return parts, bare

    def _identified(self, item: Header) -> bytes:
        """Return the bytes to hash for a digest, for [identifier] or for [identifier, offset]."""
        reader = self._reader
        if item.kind == "bin":
            return reader.take(item.size) + bytes(4)
        if item.kind != "array" or not 1 <= item.size <= 2:
            raise UnusableError("bad_extra_keys")
        identifier = reader.header()
        if identifier.kind not in ("str", "bin"):
            raise UnusableError("bad_extra_keys")
        part = reader.take(identifier.size)
        return part + (bytes(4) if item.size == 1 else offset_of(reader.header()))

    def _counted(self, part: bytes) -> bytes:
        self._count(2, len(part), MAX_EXTRA_BYTES)
        return part

    def _count(self, what: int, more: int, most: int) -> None:
        self._sums[what] += more
        if self._sums[what] > most:
            raise UnusableError("over_limit")

    def _tag(self) -> bytes:
        start = self._reader.at
        header = self._reader.header()
        if header.kind == "str":
            return self._reader.take(header.size)
        self._reader.at = start
        self._reader.skip()
        return b""

    def _field(self, field: str) -> Header | None:
        if field.encode() not in self._at:
            return None
        self._reader.at = self._at[field.encode()]
        header = self._reader.header()
        return None if header.kind == "nil" else header

    def _hash(self, header: Header) -> int:
        """Return a block's name; a digest becomes its last 8 bytes, big-endian, as vLLM itself
        shortens it.
        """
        if header.kind == "int":
            return header.value % 2**64
        if header.kind != "bin" or not 1 <= header.size <= MAX_HASH_BYTES:
            raise UnusableError("bad_hashes")
        return int.from_bytes(self._reader.take(header.size)[-8:], "big")

    def _utf8(self, size: int, why: str) -> bytes:
        text = self._reader.take(size)
        try:
            text.decode()
        except UnicodeDecodeError:
            raise UnusableError(why) from None
        return text


MAX_PAYLOAD_BYTES = 32 << 20  # one batch; a full 131k-token prompt is about 0.7 MB
MAX_EVENTS = 1 << 16  # of one batch
MAX_BLOCK_SIZE = 1 << 16  # tokens a block
MAX_RANK = (1 << 16) - 1  # and the highest cache group

# vLLM's kinds of groups whose every leading block a hit needs (`v1/kv_cache_interface.py`, 0.22).
_FULL_ATTENTION = (b"full_attention", b"mla_attention", b"sink_full_attention")
_WINDOWS = (b"sliding_window", b"sliding_window_mla")
_STATE = b"mamba"
_MAX_WINDOW = 2**31 - 1


class EventBatch:
    """A batch of KV events, decoded. Lifetime: call to feed.

    `blocks` counts the stored blocks, `len` the events that can be used, `skipped` the others, and
    `skips` the same by reason. The reasons are: "unknown_type"; "bad_hashes" of blocks or of the
    parent; "bad_tokens", which are not all ints in 0..2^63-1 (bigrams and strings are not);
    "token_count", not blocks x block_size tokens; "bad_block_size", not in 0..65536, or 0 with
    tokens; "unknown_medium"; "bad_extra_keys" of an unknown shape; "bad_field", a bad value of any
    other field; "over_limit", too many blocks, tokens or bytes of extra keys for one batch;
    "never_removed", an event of LMCache's connector in vLLM's process, which reports what it stores
    and never what it drops. Such an event gives tokens for the medium "cpu", in lower case, and no
    cache group. If an event has several faults, the first one counts, in this order, except that
    "token_count" comes after "bad_block_size". A faulty event does not affect the others. Names are
    uint64: ints modulo 2^64, digests by their last 8 bytes, big-endian. Raises TypeError for a
    payload that is no buffer of bytes. Raises ValueError with the reason for bytes that are no
    msgpack of an array [time, events, rank], and for too many bytes.
    """

    def __init__(self, payload: Buffer) -> None:
        data = data_bytes(payload, "payload")
        if len(data) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"event batch: {len(data)} bytes, at most {MAX_PAYLOAD_BYTES}")
        self.ts_s = 0.0
        self.rank = 0
        self._skips: dict[str, int] = {}
        self._unknown_media: dict[str, int] = {}
        self.blocks = 0
        self._events: list[tuple[Any, ...]] = []
        try:
            self._read(Reader(data))
        except ValueError as error:
            raise ValueError(f"event batch: {error}") from None

    def __len__(self) -> int:
        return len(self._events)

    @property
    def skipped(self) -> int:
        """The number of events that cannot be used."""
        return sum(self._skips.values())

    def skips(self) -> dict[str, int]:
        """Return the number of unusable events by reason."""
        return dict(self._skips)

    def unknown_media(self) -> dict[str, int]:
        """Return the number of events skipped for an unknown medium, by its name; events beyond the
        first eight names of a batch are under "".

        A medium's name is the whole characters of its first 48 bytes. A GPU that is not the
        worker's own has its locality in the name, too ("GPU REMOTE").
        """
        return dict(self._unknown_media)

    @property
    def windows_alone(self) -> bool:
        """Whether the batch stores blocks of windows or states and none of full attention."""
        kinds = {event[10] for event in self._events if event[0] == "stored"}
        return bool(kinds & {"window", "state"}) and "full" not in kinds

    def listed(self) -> list[tuple[Any, ...]]:
        """Return the events in order, each as one of these tuples:

        ("stored", names, parent, tokens, block_size, tier, lora_name, salt, extras, group, cache,
        window, masked): a chain of blocks. `names` are uint64. `parent` is the name before the
        first one, or None. `tokens` are int32, or int64 if one is beyond that, and empty if blocks
        are only named (offload tiers). `tier` is 0 for the GPU, 1 for the host, 2 for disk.
        `extras` are the bytes to hash after the tokens of each block, or () if no block has any.
        `group` is a hybrid model's cache group or None. `cache` says what the group keeps, or is
        None if the event does not say: "full" every block, "window" those of the last `window`
        tokens, "state" one state, "other" an unknown part. `masked` occurs for windows and states
        only: `tokens` are then those of more blocks than are named, and empty if one is beyond
        int32;

        ("removed", names, tier, group);

        ("cleared",).
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
        self._unknown_media = fields.unknown_media
        for _ in range(events.size):
            self._read_event(reader, fields)
        if envelope.size > 2:
            self.rank = _rank(reader)
        for _ in range(3, envelope.size):
            reader.skip()
        if reader.at != len(reader.data):
            raise ValueError("more bytes follow it")

    def _read_event(self, reader: Reader, fields: Fields) -> None:
        tag = fields.open()
        end = reader.at
        try:
            self._events.append(self._event(tag, fields))
            fields.keep()
        except UnusableError as unusable:
            self._skips[unusable.why] = self._skips.get(unusable.why, 0) + 1
            fields.drop()
        reader.at = end

    def _event(self, tag: bytes, fields: Fields) -> tuple[Any, ...]:
        if tag == b"BlockStored":
            return self._stored(fields)
        if tag == b"BlockRemoved":
            return "removed", fields.hashes(), fields.tier(), fields.small("group_idx", MAX_RANK)
        if tag in FIELDS:
            return ("cleared",)
        raise UnusableError("unknown_type")

    def _stored(self, fields: Fields) -> tuple[Any, ...]:
        names = fields.hashes()
        parent = fields.parent()
        tokens = fields.tokens()
        told_size = fields.small("block_size", MAX_BLOCK_SIZE, "bad_block_size")
        block_size = 1 if told_size is None else told_size
        if block_size == 0 and len(tokens):
            raise UnusableError("bad_block_size")
        masked = bool(len(tokens)) and len(tokens) != len(names) * block_size
        if masked:
            if not fields.is_text("kv_cache_spec_kind", (*_WINDOWS, _STATE)):
                raise UnusableError("token_count")
            if tokens.dtype == np.int64:
                tokens = np.empty(0, dtype=np.int32)
        lora_id = fields.lora_id()
        tier = fields.tier()
        lora_name = fields.text("lora_name")
        salt = fields.text("cache_salt")
        group = fields.small("group_idx", MAX_RANK)
        cache, window = _cache(fields)
        if lora_name is None and lora_id:  # vLLM up to 0.13 gives no name, but it is an adapter
            lora_name = b"lora_id:%d" % lora_id
        at_root = parent is None and salt is None
        extras, keyed_salt = fields.extra_keys(len(names), lora_name, at_root)
        salt = salt if keyed_salt is None else keyed_salt
        extras = fields.mm_keys(extras, len(names))
        if len(tokens) and group is None and fields.is_text("medium", (b"cpu",)):
            raise UnusableError("never_removed")
        self.blocks += len(names)
        lora = None if lora_name is None else lora_name.decode()
        salted = None if salt is None else salt.decode()
        return (
            *("stored", names, parent, tokens, block_size, tier),
            *(lora, salted, extras, group, cache, window, masked),
        )


def _cache(fields: Fields) -> tuple[str | None, int]:
    """Return what a cache group keeps, and its window's tokens; a window without a size counts as
    "other".
    """
    kind = fields.text("kv_cache_spec_kind")
    if kind in _WINDOWS:
        window = fields.small("kv_cache_spec_sliding_window", _MAX_WINDOW) or 0
        return ("window" if window else "other"), window
    if kind is None or kind in _FULL_ATTENTION:
        return (None if kind is None else "full"), 0
    return ("state" if kind == _STATE else "other"), 0


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
