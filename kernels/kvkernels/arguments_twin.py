"""Checks of arguments that the plain twins of the event path share, in the native core's words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkernels.twins import _buffer, _integer

if TYPE_CHECKING:
    from typing_extensions import Buffer


def in_range(value: int, name: str, least: int, most: int) -> int:
    """An int within both limits. TypeError, ValueError."""
    number = _integer(value, name)
    if not least <= number <= most:
        raise ValueError(f"{name} must be {least}..{most}, got {value}")
    return number


def uint64(value: int, name: str) -> int:
    """An int in 0..2^64-1. TypeError, ValueError."""
    number = _integer(value, name)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{name} must be a uint64, got {number}")
    return number


def parent_of(parent: int | None) -> int | None:
    """The name of a parent, or None where there is none."""
    return None if parent is None else uint64(parent, "parent")


def names_of(names: Buffer) -> list[int]:
    """A buffer of uint64 as ints."""
    blocks: list[int] = _buffer(names, "names", "uint64").tolist()
    return blocks


def data_bytes(data: Buffer, name: str) -> bytes:
    """A copy of a buffer's bytes. TypeError for anything else."""
    try:
        return bytes(memoryview(data))
    except TypeError:
        raise TypeError(f"{name} must be a buffer of bytes, got {type(data).__name__}") from None
