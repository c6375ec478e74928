"""A step's batch as one run of numbers, for the other ranks of a group.

Framing: int64 values, those of `Sizes` and a magic one, then those of `spans`; then the batch's
data. Both ends are processes of one engine on one machine; the magic catches a reader that lost its
place, not an attacker.
"""

from __future__ import annotations

from typing import IO

import numpy as np
import torch

from engine.model.batch import FlatBatch, Sizes

_MAGIC = 0x57_52_42_33
_HEAD = 8 * (len(Sizes._fields) + 1)


def batch_bytes(batch: FlatBatch) -> bytes:
    """`batch`, framed. It must know its tokens: rows of the token pool are rank 0's."""
    head = np.array([*batch.sizes, _MAGIC], dtype="<i8")
    spans = np.array(batch.spans, dtype="<i8")
    return head.tobytes() + spans.tobytes() + batch.data.cpu().numpy().tobytes()


def read_batch(pipe: IO[bytes], device: str) -> FlatBatch | None:
    """The next batch, on `device`; None at the end. Raises EOFError for a part of one."""
    head = pipe.read(_HEAD)
    if not head:
        return None
    *counts, magic = np.frombuffer(_whole(head, _HEAD), "<i8").tolist()
    if magic != _MAGIC:
        raise EOFError("the batches of rank 0 do not begin where they should")
    sizes = Sizes(*counts)
    spans_size = 3 * 8 * sizes.requests
    size = spans_size + sizes.nbytes
    body = bytearray(_whole(pipe.read(size), size))
    spans = np.frombuffer(body, "<i8", 3 * sizes.requests).reshape(-1, 3)
    data = torch.frombuffer(body, dtype=torch.uint8, offset=spans_size)
    return FlatBatch.over(data, sizes, tuple((int(a), int(b), int(c)) for a, b, c in spans)).on(
        device
    )


def _whole(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise EOFError(f"rank 0 ended within a batch: {len(data)} of {size} bytes")
    return data
