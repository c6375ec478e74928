"""Load a policy by its specification: a policy, then the wrappers round it, in order.

    NAME?key=value&key=value|WRAPPER?key=value|...

Each name is a built-in's, an installed entry point's, or `package.module:attr`. Names and values
are percent-decoded, so `|` inside one is written %7C, `&` %26, `?` %3F, `%` %25.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from policies.answers import WrapperFailedError, checked, checked_numbers
from policies.contract import FleetView, Floats, Policy, RequestView, Wrapper
from policies.naming import POLICY, RAISABLE, WRAPPER, Kind
from policies.parameters import (
    Parameter,
    PolicyError,
    Value,
    coerce_all,
    parameters_of,
    text_of,
)

# Every policy takes it, because `pick` uses it and not the formula.
TEMPERATURE = Parameter("temperature", float, optional=False, default=0.0)
Params = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class LoadedWrapper:
    """A wrapper, its parameters, a check of its answers. Lifetime: process; keeps no state."""

    name: str  # as it was asked for
    params: Params  # all of them, defaults included
    wrapper: Wrapper

    def adjust(self, costs: Floats, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        """What it makes of `costs`. Raises PolicyError, in its name, for whatever goes wrong."""
        shown = costs.view()
        shown.flags.writeable = False  # they may be a column, or the inner policy's own
        try:
            adjusted = self.wrapper.adjust(shown, request, fleet, state)
        except Exception as error:
            told = f"wrapper {self.name} failed: {type(error).__name__}: {error}"
            raise WrapperFailedError(told) from error
        return checked_numbers("wrapper", self.name, adjusted, len(fleet))

    def terms(
        self, costs: Floats, adjusted: Floats, request: RequestView, fleet: FleetView, state: Any
    ) -> dict[str, Floats]:
        """What it added to each row (+inf: it ruled the row out), then terms of its own."""
        added = np.zeros(len(fleet))
        np.subtract(adjusted, costs, out=added, where=~(np.isinf(costs) & np.isinf(adjusted)))
        of = getattr(self.wrapper, "terms", None)
        own = {} if of is None else of(costs, request, fleet, state)
        return {self.name: added} | {f"{self.name}.{name}": term for name, term in own.items()}


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy in its wrappers, and a check of all answers. Lifetime: process; keeps no state."""

    name: str  # as it was asked for, parameters left out: "hybrid", "hybrid|bounded_load"
    params: Params  # all of its own, and "wrapper.parameter" of each wrapper, defaults included
    temperature: float  # for `policies.pick.pick`; 0 = lowest cost, ties drawn
    policy: Policy
    wrappers: tuple[LoadedWrapper, ...] = ()

    @property
    def spec(self) -> str:
        """A specification that loads the same policy again, every parameter written out."""
        own = {name: value for name, value in self.params.items() if "." not in name}
        inner = _spec(self.name.partition("|")[0], {**own, "temperature": self.temperature})
        return "|".join([inner, *(_spec(quoted(w.name), w.params) for w in self.wrappers)])

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        """The costs, float64[rows]. Raises PolicyError when anyone answered anything else."""
        if not self.wrappers:
            costs = self.policy.costs(request, fleet, state)
            return checked("policy", self.name, costs, len(fleet))
        costs = self._inner_costs(request, fleet, state)
        for wrapper, its in zip(self.wrappers, state[1:], strict=True):
            costs = wrapper.adjust(costs, request, fleet, its)
        return costs

    @property
    def has_terms(self) -> bool:
        """Whether `terms` has anything to tell."""
        return bool(self.wrappers) or hasattr(self.policy, "terms")

    def terms(self, request: RequestView, fleet: FleetView, state: Any) -> dict[str, Floats]:
        """The costs taken apart, float64[rows] each: the policy's own terms where it names them
        (else its cost, by its name), then what each wrapper added. For explanations."""
        inner = state[0] if self.wrappers else state
        of = getattr(self.policy, "terms", None)
        terms = {} if of is None else dict(of(request, fleet, inner))
        if not self.wrappers:
            return terms
        costs = self._inner_costs(request, fleet, state)
        terms = terms or {self.name.partition("|")[0]: costs}
        for wrapper, its in zip(self.wrappers, state[1:], strict=True):
            adjusted = wrapper.adjust(costs, request, fleet, its)
            terms |= wrapper.terms(costs, adjusted, request, fleet, its)
            costs = adjusted
        return terms

    def _inner_costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        costs = self.policy.costs(request, fleet, state[0])
        return checked_numbers("policy", self.name.partition("|")[0], costs, len(fleet))

    @property
    def needs_sessions(self) -> bool:
        """Whether it, or a wrapper, reads what only the followed sessions tell."""
        asked = (self.policy, *(w.wrapper for w in self.wrappers))
        return any(getattr(one, "needs_sessions", False) for one in asked)

    def initial_state(self) -> Any:
        """The state before the first fact: None for a policy without memory. With wrappers, a
        tuple of the policy's and of each one's."""
        first = _initial(self.policy)
        return (first, *(_initial(w.wrapper) for w in self.wrappers)) if self.wrappers else first

    @property
    def remembers(self) -> bool:
        """Whether any of it has a memory: what has none need not be told any fact."""
        parts = (self.policy, *(w.wrapper for w in self.wrappers))
        return any(hasattr(part, "observe") for part in parts)

    def observe(self, fact: Any, state: Any) -> Any:
        """The state after `fact` (`policies.facts`); the same one where there is no memory."""
        if not self.wrappers:
            return _observed(self.policy, fact, state)
        seen = [_observed(self.policy, fact, state[0])]
        for wrapper, its in zip(self.wrappers, state[1:], strict=True):
            try:
                seen.append(_observed(wrapper.wrapper, fact, its))
            except Exception as error:
                told = f"wrapper {wrapper.name} failed: {type(error).__name__}: {error}"
                raise WrapperFailedError(told) from error
        return tuple(seen)


@dataclass(frozen=True, slots=True)
class FunctionPolicy:
    """A plain function `costs(request, fleet, state, *, ...)` as a policy. Lifetime: process."""

    function: Callable[..., Floats]
    params: Params

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        return self.function(request, fleet, state, **self.params)


@dataclass(frozen=True, slots=True)
class FunctionWrapper:
    """A plain function `adjust(costs, request, fleet, state, *, ...)` as a wrapper."""

    function: Callable[..., Floats]
    params: Params

    def adjust(self, costs: Floats, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        return self.function(costs, request, fleet, state, **self.params)


def load(spec: str) -> LoadedPolicy:
    """The policy that `spec` asks for, in its wrappers; every parameter validated.

    Raises PolicyError for an unknown name (with the valid ones), something that is no policy or
    no wrapper, a wrapper given twice, and an unknown, repeated or invalid parameter.
    """
    first, *others = spec.split("|")
    name, values, policy = _load(POLICY, first, FunctionPolicy, {TEMPERATURE.name: TEMPERATURE})
    temperature = values.pop(TEMPERATURE.name)
    assert isinstance(temperature, float)
    if not 0.0 <= temperature < float("inf"):
        raise PolicyError(f"policy {name}: temperature is {temperature}; it must be 0 or more")
    wrappers = tuple(LoadedWrapper(*_load(WRAPPER, part, FunctionWrapper, {})) for part in others)
    for number, wrapper in enumerate(wrappers):
        if any(other.name == wrapper.name for other in wrappers[:number]):
            raise PolicyError(f"wrapper {wrapper.name} is given twice; give it once")
        values |= {f"{quoted(wrapper.name)}.{key}": value for key, value in wrapper.params.items()}
    chain = "|".join([quoted(name), *(quoted(wrapper.name) for wrapper in wrappers)])
    return LoadedPolicy(chain, values, temperature, policy, wrappers)


def names() -> list[str]:
    """Names of policies that `load` knows: the built-ins, then the installed entry points."""
    return POLICY.names()


def wrapper_names() -> list[str]:
    """Names of wrappers that `load` knows: the built-ins, then the installed entry points."""
    return WRAPPER.names()


def name_of(spec: str) -> str:
    """A specification without its parameters: "hybrid|bounded_load". It is not checked."""
    return "|".join(part.partition("?")[0] for part in spec.split("|"))


def quoted(name: str) -> str:
    """A name as a specification spells it."""
    return quote(name, safe=":-")


def _load(
    kind: Kind, text: str, function: Callable[..., Any], extra: Mapping[str, Parameter]
) -> tuple[str, dict[str, Value], Any]:
    name, _, query = text.partition("?")
    name = unquote(name).strip()
    who = f"{kind.word} {name}"
    attr = kind.find(name)
    values = coerce_all(who, {**parameters_of(who, attr), **extra}, _pairs(who, query))
    own = {key: value for key, value in values.items() if key not in extra}
    if not inspect.isclass(attr):
        return name, values, function(attr, own)
    try:
        return name, values, attr(**own)
    except ValueError as error:  # its own validation
        raise PolicyError(f"{who}: {error}") from error
    except RAISABLE as error:
        told = f"cannot be made, it raised {type(error).__name__}: {error}"
        raise PolicyError(f"{who}: {told}") from error


def _pairs(who: str, query: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = (unquote(piece) for piece in part.partition("="))
        if not equals:
            raise PolicyError(f"{who}: {part!r} is not of the form key=value")
        if key in pairs:
            raise PolicyError(f"{who}: parameter {key} is given twice")
        pairs[key] = value
    return pairs


def _spec(name: str, params: Params) -> str:
    pairs = [f"{key}={quote(text_of(value), safe='')}" for key, value in params.items()]
    return f"{name}?{'&'.join(pairs)}" if pairs else name


def _initial(part: Any) -> Any:
    initial = getattr(part, "initial_state", None)
    return None if initial is None else initial()


def _observed(part: Any, fact: Any, state: Any) -> Any:
    observe = getattr(part, "observe", None)
    return state if observe is None else observe(fact, state)
