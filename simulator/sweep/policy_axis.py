"""Policies of a sweep: names with the values that their parameters may take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any
from urllib.parse import quote

from policies.load import load
from policies.parameters import PolicyError, text_of
from simulator.sweep.axes import Scalar, Values, parse_values
from simulator.sweep.errors import SweepError

SHAPE = (
    "a policy is a name, a specification as hybrid?load_factor=2, or a name with values for its "
    "parameters as {hybrid: {load_factor: [1, 2]}}; wrappers follow behind |, and a wrapper's "
    "parameter is written as {hybrid|bounded_load: {bounded_load.epsilon: [0.1, 1]}}"
)


@dataclass(frozen=True, slots=True)
class PolicyAxis:
    """One policy and what its parameters may be. Lifetime: one sweep."""

    spec: str  # the name, and parameters that are not varied where it was given as one text
    params: Mapping[str, Values]

    @property
    def varies(self) -> bool:
        """Whether its parameters leave anything to choose."""
        return any(values.varies for values in self.params.values())

    def specs(self) -> Iterator[str]:
        """Every combination of listed values, as specifications."""
        for chosen in product(*(values.listed for values in self.params.values())):
            yield self._spec(dict(zip(self.params, chosen, strict=True)))

    def draw(self, random: Random) -> str:
        """One specification."""
        return self._spec({name: values.draw(random) for name, values in self.params.items()})

    def _spec(self, chosen: Mapping[str, Scalar]) -> str:
        inner, *wrappers = self.spec.split("|")
        pairs: dict[str, list[str]] = {part: [] for part in ("", *wrappers)}
        for key, value in chosen.items():  # "epsilon", or "bounded_load.epsilon" of a wrapper
            wrapper, _, name = key.rpartition(".")
            pairs[wrapper].append(f"{name}={quote(text_of(value), safe='')}")
        parts = ((wrapper or inner, "&".join(of)) for wrapper, of in pairs.items())
        return "|".join(part + ("?" + told if told else "") for part, told in parts)


def parse_policies(where: str, given: Any, *, grid: bool) -> list[PolicyAxis]:
    """The policies that a sweep file lists. Raises `SweepError` with all that is wrong."""
    if not isinstance(given, list) or not given:
        raise SweepError([f"{where}: give a list of policies; {SHAPE}"])
    found: list[PolicyAxis] = []
    problems: list[str] = []
    for number, item in enumerate(given):
        try:
            found.append(_parse(f"{where}[{number}]", item, grid=grid))
        except SweepError as error:
            problems += error.problems
    if problems:
        raise SweepError(problems)
    return found


def check_policies(specs: list[str]) -> None:
    """Loads each specification once. Raises `SweepError` with what the policies refuse."""
    problems: list[str] = []
    for spec in dict.fromkeys(specs):
        try:
            load(spec)
        except PolicyError as error:
            problems.append(str(error))
    if problems:
        raise SweepError(list(dict.fromkeys(problems)))


def _parse(where: str, item: Any, *, grid: bool) -> PolicyAxis:
    if isinstance(item, str):
        return PolicyAxis(item, {})
    if not isinstance(item, dict) or len(item) != 1:
        raise SweepError([f"{where}: {item!r} is no policy; {SHAPE}"])
    name, params = next(iter(item.items()))
    if "?" in name or not isinstance(params or {}, dict):
        raise SweepError([f"{where}: {item!r} is no policy; {SHAPE}"])
    check_policies([name])  # before its parameters, so that a wrong name is told as such
    wrappers = name.split("|")[1:]
    for key in params or {}:
        wrapper, dot, _ = str(key).rpartition(".")
        if dot and wrapper not in wrappers:
            known = ", ".join(wrappers) or "none"
            raise SweepError(
                [f"{where}.{name}.{key}: {wrapper} is no wrapper of {name}; wrappers: {known}"]
            )
    values = {
        key: parse_values(f"{where}.{name}.{key}", value, grid=grid)
        for key, value in (params or {}).items()
    }
    return PolicyAxis(name, values)
