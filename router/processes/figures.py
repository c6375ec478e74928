"""Numbers for Prometheus, as a satellite tells them."""

from __future__ import annotations

import msgspec


class Counted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One number of a family."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class Family(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Numbers of one name, as the satellite has them now."""

    name: str
    text: str
    kind: str
    samples: tuple[Counted, ...]
