"""The timeline file: what befalls which worker when.

YAML (or JSON), a list of items such as `{at_s: 60, worker: 2, do: die}`:

- `die`: the process ends; its connections break. `restart`: it comes (back) with a cold cache.
- `hang`, with `for_s`: it takes no step and answers nothing, and then goes on.
- `slow`, with `factor`: later steps take so many times as long; 1 ends it.
- `clear`: its cache is reset. `lose_events`, with `for_s`: its KV events do not arrive.
- `drain`: it finishes what it has, and is removed once idle.
- `join`, with `group` (0 where left out) instead of `worker`: a new worker of that group.

Workers are numbered from 0 in the order of the groups; those that join go on from there.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from simulator.replay.errors import ReplayError
from simulator.yaml_file import YamlFileError, read_yaml

KINDS: dict[str, tuple[str, ...]] = {  # each with the keys it takes besides at_s and do
    "die": ("worker",),
    "restart": ("worker",),
    "drain": ("worker",),
    "join": ("group",),
    "slow": ("worker", "factor"),
    "clear": ("worker",),
    "lose_events": ("worker", "for_s"),
    "hang": ("worker", "for_s"),
}
_MAX_FACTOR = 1e6
_MAX_HANG_S = 86_400.0  # beyond it, a process that hangs is a process that died


class Fault(msgspec.Struct, frozen=True):
    """One item. `worker` is the group of a worker that joins."""

    at_ns: int
    do: str
    worker: int
    factor: float = 1.0
    for_ns: int = 0


def read_faults(path: str, workers: int, groups: int) -> tuple[Fault, ...]:
    """The timeline in `path`, in order of time (of the file where times are equal).

    Raises ReplayError with the item and the key at fault, and what is allowed there.
    """
    try:
        items = read_yaml(Path(path))
    except YamlFileError as error:
        raise ReplayError(str(error)) from error
    return parse_faults(items, path, workers, groups)


def parse_faults(items: Any, path: str, workers: int, groups: int) -> tuple[Fault, ...]:
    """As `read_faults`, of what the file holds. `path` is for messages."""
    if items is None:
        return ()
    if not isinstance(items, list):
        raise ReplayError(f"{path}: expected a list of faults, got {type(items).__name__}")
    faults = [_fault(_Item(item, f"{path}: [{n}]")) for n, item in enumerate(items)]
    faults.sort(key=lambda fault: fault.at_ns)
    known = workers
    for fault in faults:
        limit = groups if fault.do == "join" else known
        if fault.worker >= limit:
            what = "group" if fault.do == "join" else "worker"
            raise ReplayError(
                f"{path}: {fault.do} at {fault.at_ns / 1e9:g} s: {what} {fault.worker} does not "
                f"exist then; expected 0..{limit - 1}"
            )
        known += fault.do == "join"
    return tuple(faults)


class _Item:
    """One item of the list and where it stands."""

    def __init__(self, item: Any, where: str) -> None:
        if not isinstance(item, dict):
            raise ReplayError(f"{where}: expected keys such as at_s, worker, do; got {item!r}")
        self.item: dict[Any, Any] = item
        self.where = where

    def kind(self) -> str:
        """Its `do`, and no key that does not belong to it."""
        kind = self.item.get("do")
        if not isinstance(kind, str) or kind not in KINDS:
            raise ReplayError(f"{self.where}.do: {kind!r}; expected one of: {', '.join(KINDS)}")
        allowed = ("at_s", "do", *KINDS[kind])
        for key in self.item:
            if key not in allowed:
                raise ReplayError(
                    f"{self.where}.{key}: no key of {kind}; it takes: {', '.join(allowed)}"
                )
        return kind

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number, `low <= number <= high`."""
        value = self.item.get(key, default)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not low <= value <= high:  # type: ignore[operator]
            got = "missing" if value is None else repr(value)
            raise ReplayError(f"{self.where}.{key}: {got}; expected a number of {low:g}..{high:g}")
        return float(value)  # type: ignore[arg-type]

    def index(self, key: str, default: int | None = None) -> int:
        """A whole number, 0 or more."""
        value = self.item.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            got = "missing" if value is None else repr(value)
            raise ReplayError(f"{self.where}.{key}: {got}; expected a whole number, 0 or more")
        return value


def _fault(item: _Item) -> Fault:
    kind = item.kind()
    factor, for_s = 1.0, 0.0
    if kind == "slow":
        factor = item.number("factor", 1 / _MAX_FACTOR, _MAX_FACTOR)
    if "for_s" in KINDS[kind]:
        for_s = item.number("for_s", 1e-9, _MAX_HANG_S if kind == "hang" else 1e9)
    worker = item.index("group", 0) if kind == "join" else item.index("worker")
    at_s = item.number("at_s", 0.0, 1e9)
    return Fault(_ns(at_s), kind, worker, factor, max(_ns(for_s), 1) if for_s else 0)


def _ns(seconds: float) -> int:
    return math.floor(seconds * 1e9 + 0.5)
