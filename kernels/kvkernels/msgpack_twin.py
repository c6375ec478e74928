"""A pull parser of msgpack in plain Python, the twin of `kernels/src/msgpack.h`.

It looks at one header at a time and never makes a value that nobody asked for, so that both
readers refuse the same bytes for the same reason. Format: msgpack specification, 2017.
"""

from __future__ import annotations

import struct
from typing import Literal, NamedTuple

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
