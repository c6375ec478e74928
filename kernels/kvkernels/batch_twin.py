"""One batch of KV events in plain Python: the twin of the native `EventBatch`.

Formats: vLLM `distributed/kv_events.py` 0.9 to 0.33, SGLang `disaggregation/kv_events.py` 0.4.8
to 0.5.23, TensorRT-LLM's ZMQ push: the envelope is an array `[time, events, rank]`, each event an
array `[tag, fields...]` or a map with the key `type`, decided per event.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from kvkernels.arguments_twin import data_bytes
from kvkernels.event_fields_twin import FIELDS, Fields
from kvkernels.msgpack_twin import Reader

if TYPE_CHECKING:
    from typing_extensions import Buffer

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
    that are malformed or beyond a limit of this module or of `event_fields_twin.py`.
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
