"""Load a policy by its specification: `NAME?key=value&key=value` or `package.module:attr?...`."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, cast
from urllib.parse import quote, unquote

import numpy as np

from policies import POLICIES
from policies.contract import FleetView, Floats, Policy, RequestView
from policies.parameters import Parameter, PolicyError, Value, coerce_all, parameters_of, text_of

ENTRY_POINTS = "warmroute.policies"
# Every policy takes it, because `pick` uses it and not the formula.
TEMPERATURE = Parameter("temperature", float, optional=False, default=0.0)


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy, its parameters, a check of its answers. Lifetime: process; keeps no state."""

    name: str  # as it was asked for: a built-in's name, an entry point's, or package.module:attr
    params: Mapping[str, Value]  # all of its own parameters, defaults included
    temperature: float  # for `policies.pick.pick`; 0 = lowest cost, ties drawn
    policy: Policy

    @property
    def spec(self) -> str:
        """A specification that loads the same policy again, every parameter written out."""
        pairs = {**self.params, "temperature": self.temperature}
        return f"{self.name}?" + "&".join(
            f"{key}={quote(text_of(value), safe='')}" for key, value in pairs.items()
        )

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        """The policy's costs, float64[rows]. Raises PolicyError when it answered anything else."""
        costs = self.policy.costs(request, fleet, state)
        if not isinstance(costs, np.ndarray) or costs.dtype.char != "d":
            kind = costs.dtype if isinstance(costs, np.ndarray) else type(costs).__name__
            raise PolicyError(f"policy {self.name} returned {kind}; return a float64 array")
        if costs.shape != (len(fleet),):
            raise PolicyError(
                f"policy {self.name} returned shape {costs.shape} for {len(fleet)} workers; "
                f"return one cost for each: ({len(fleet)},)"
            )
        return costs

    def initial_state(self) -> Any:
        """The policy's state before the first fact; None for one without memory."""
        initial = getattr(self.policy, "initial_state", None)
        return None if initial is None else initial()

    @property
    def remembers(self) -> bool:
        """Whether the policy has a memory: one that has none need not be told any fact."""
        return hasattr(self.policy, "observe")

    def observe(self, fact: Any, state: Any) -> Any:
        """The policy's state after `fact` (`policies.facts`); None for one without memory."""
        observe = getattr(self.policy, "observe", None)
        return state if observe is None else observe(fact, state)


@dataclass(frozen=True, slots=True)
class FunctionPolicy:
    """A plain function `costs(request, fleet, state, *, ...)` as a policy. Lifetime: process."""

    function: Callable[..., Floats]
    params: Mapping[str, Value]

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        return self.function(request, fleet, state, **self.params)


def load(spec: str) -> LoadedPolicy:
    """The policy that `spec` asks for; every parameter validated.

    Names and values are percent-decoded. Raises PolicyError for an unknown name (with the valid
    ones), something that is no policy, and an unknown, repeated or invalid parameter.
    """
    name, _, query = spec.partition("?")
    name = unquote(name).strip()
    attr = _find(name)
    valid = {**parameters_of(name, attr), TEMPERATURE.name: TEMPERATURE}
    values = coerce_all(name, valid, _pairs(name, query))
    temperature = values.pop(TEMPERATURE.name)
    assert isinstance(temperature, float)
    if not 0.0 <= temperature < float("inf"):
        raise PolicyError(f"policy {name}: temperature is {temperature}; it must be 0 or more")
    if not inspect.isclass(attr):
        return LoadedPolicy(name, values, temperature, FunctionPolicy(attr, values))
    try:
        policy = cast(Policy, attr(**values))
    except ValueError as error:  # its own validation
        raise PolicyError(f"policy {name}: {error}") from error
    return LoadedPolicy(name, values, temperature, policy)


def names() -> list[str]:
    """Names that `load` knows: the built-ins, then the installed entry points."""
    others = {entry.name for entry in entry_points(group=ENTRY_POINTS)} - POLICIES.keys()
    return [*POLICIES, *sorted(others)]


def _pairs(name: str, query: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = (unquote(piece) for piece in part.partition("="))
        if not equals:
            raise PolicyError(f"policy {name}: {part!r} is not of the form key=value")
        if key in pairs:
            raise PolicyError(f"policy {name}: parameter {key} is given twice")
        pairs[key] = value
    return pairs


def _find(name: str) -> Any:
    """The class or function behind a name. Built-ins cannot be shadowed by an entry point."""
    target = POLICIES.get(name)
    if target is None and ":" in name:
        target = name
    if target is None:
        found = [e.value for e in entry_points(group=ENTRY_POINTS) if e.name == name]
        if not found and "." in name:
            raise PolicyError(
                f"policy {name}: `:attr` is missing; name a class or function of the module, "
                f"as in {name}:MyPolicy"
            )
        if not found:
            close = difflib.get_close_matches(name, names(), n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise PolicyError(
                f"no policy {name!r}{hint}; valid: {', '.join(names())}, or package.module:attr"
            )
        target = found[0]
    module_name, _, attr_name = target.partition(":")
    try:
        attr = getattr(importlib.import_module(module_name), attr_name)
    except ModuleNotFoundError as error:
        raise PolicyError(
            f"policy {name}: cannot import {target}: {error}; install it, or name the folder it "
            "is in by PYTHONPATH"
        ) from error
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        raise PolicyError(f"policy {name}: cannot import {target}: {error}") from error
    if inspect.isclass(attr) and callable(getattr(attr, "costs", None)):
        return attr
    if inspect.isfunction(attr) and _asked_with(attr) == ["request", "fleet", "state"]:
        return attr
    raise PolicyError(
        f"policy {name}: {target} is a {type(attr).__name__}; it must be a class with a method "
        "costs(request, fleet, state), or a function costs(request, fleet, state, *, ...)"
    )


def _asked_with(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
