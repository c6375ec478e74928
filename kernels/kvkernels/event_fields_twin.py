"""The fields of one KV event in plain Python; `batch_twin.py` reads batches with them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvkernels.event_images_twin import offset_of, read_images
from kvkernels.msgpack_twin import Header, Reader

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
