"""Numbers on a command line: what argparse calls to read and refuse them."""

from __future__ import annotations

import argparse


def positive(text: str) -> float:
    """A number above 0."""
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def not_negative(text: str) -> float:
    """A number of 0 or more."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of 0 or more")
    return value


def share(text: str) -> float:
    """A share in [0, 1)."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share: 0 or more and below 1")
    return value


def count(text: str) -> int:
    """A whole number of 1 or more; 300k and 2M are understood."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return value


def capacity(text: str) -> int | None:
    """A count of tokens, or inf: None."""
    return None if text == "inf" else count(text)


def whole(text: str) -> int:
    """A whole number of 0 or more."""
    value = _whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 0 or more")
    return value


def port(text: str) -> int:
    """A port, or 0: the system picks."""
    value = _whole(text)
    if not 0 <= value <= 65_535:
        raise argparse.ArgumentTypeError(f"{text} is not a port, 0 to 65535")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _whole(text: str) -> int:
    digits, factor = text, 1
    if text[-1:] in ("k", "M"):
        digits, factor = text[:-1], {"k": 1_000, "M": 1_000_000}[text[-1]]
    try:
        value = float(digits) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value != value or abs(value) == float("inf") or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)
