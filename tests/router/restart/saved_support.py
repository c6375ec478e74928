"""Helpers for tests of saved KV caches: make a worker's saved cache and write a file of several."""

from __future__ import annotations

from pathlib import Path

from policies.facts import CacheSnapshot
from router.restart.saved_caches import Owner, Saved, SavedFile, SnapshotHead

URL = "http://127.0.0.1:9001"


def saved_of(n: int, blocks: bytes = b"blocks") -> Saved:
    owner = Owner(f"{URL}{n}", None if n % 2 else n, "vllm", ("m", "adapter"), 16)
    flags = bool(n % 2), not n % 2
    return Saved(
        SnapshotHead(owner, 7.5), CacheSnapshot(n + 1, n - 1, 2**64 - 1 - n, *flags, blocks)
    )


def write(path: Path, workers: list[Saved]) -> int:
    file = SavedFile(path)
    for one in workers:
        file.add(one)
    return file.finish()
