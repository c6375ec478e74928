"""Large pages: which memory is gathered in them, and that it says the same afterwards."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from router.huge_pages import PAGE_BYTES, filled, gather, keep, wanted

BEGIN = 0x7F0000000000


def mapping(
    pages: float, resident: float, begin: int = BEGIN, kind: str = "rw-p", end: str = ""
) -> str:
    """A mapping of so many large pages, as /proc/self/smaps tells it."""
    size, kb = int(pages * PAGE_BYTES), int(resident * PAGE_BYTES) // 1024
    inode = "12 /lib/x" if end == "file" else "0 " + end
    line = f"{begin:x}-{begin + size:x} {kind} 00000000 00:00 {inode}\n"
    return f"{line}Size: {size // 1024:>8} kB\nRss: {kb:>8} kB\nPss: {kb:>8} kB\n"


@pytest.mark.parametrize("end", ["", "[heap]"])
def test_whole_pages_of_what_is_in_use_are_taken(end: str) -> None:
    text = mapping(4.5, 4, BEGIN + 4096, end=end)
    assert list(filled(text)) == [(BEGIN + PAGE_BYTES, BEGIN + 4 * PAGE_BYTES)]


@pytest.mark.parametrize(
    "text",
    [
        mapping(4, 1.9),  # a thread's stack, and what is kept for later
        mapping(0.9, 0.9),
        mapping(4, 4, kind="r--p"),
        mapping(4, 4, kind="rw-s"),
        mapping(4, 4, end="file"),
        mapping(4, 4, end="[stack]"),
        "",
        mapping(4, 4).partition("Rss")[0],
    ],
)
def test_nothing_else_is(text: str) -> None:
    assert list(filled(text)) == []


def test_each_mapping_counts_by_its_own_use() -> None:
    far = BEGIN + 64 * PAGE_BYTES
    text = mapping(4, 0) + mapping(2, 2, far) + mapping(4, 1, far + 8 * PAGE_BYTES)
    assert list(filled(text)) == [(far, far + 2 * PAGE_BYTES)]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("always [madvise] never\n", True),
        ("[always] madvise never\n", True),
        ("always madvise [never]\n", False),
    ],
)
def test_the_system_has_the_last_word(tmp_path: Path, said: str, expected: bool) -> None:
    switch = tmp_path / "enabled"
    switch.write_text(said)
    assert wanted(switch) == expected
    assert not wanted(tmp_path / "none")


def test_memory_says_the_same_afterwards() -> None:
    with mmap.mmap(-1, 4 * PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        wrote = bytes(range(256)) * (len(memory) // 256)
        memory[:] = wrote
        assert gather() >= 0
        assert memory[:] == wrote


async def test_each_pass_looks_anew() -> None:
    await keep((0.0, 0.0))
    await keep(())
