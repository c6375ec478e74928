"""Loads a policy with parameters and wrappers from its specification, and checks its costs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import quote, unquote

import numpy as np

from policies import POLICIES, WRAPPERS
from policies.contract import FleetView, Floats, Policy, RequestView, Wrapper
from policies.near import did_you_mean
from policies.pick import lowest

Value = float | int | bool | str | None
_TRUTH = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
_CONVERTIBLE = (float, int, bool, str)


class PolicyError(ValueError):
    """An error in a policy's name, parameter or result; the message says what would be valid."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """The name, type and default value of one parameter of a policy or wrapper.

    Lifetime: process.
    """

    name: str
    kind: type  # float, int, bool or str
    optional: bool  # `float | None` and the like: the word "none" gives None
    default: Value

    def __str__(self) -> str:
        kind = self.kind.__name__ + (" or none" if self.optional else "")
        return f"{self.name} ({kind}, default {text_of(self.default)})"

    def coerce(self, text: str) -> Value:
        """Return `text` converted to the parameter's type.

        Raises ValueError if the conversion is not possible.
        """
        if self.optional and text.lower() == "none":
            return None
        if self.kind is bool:
            if text.lower() not in _TRUTH:
                raise ValueError(f"{text!r} is neither true nor false")
            return _TRUTH[text.lower()]
        value: Value = self.kind(text)
        return value


def parameters_of(owner: str, attr: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters of a policy or wrapper, by name.

    For a class, these are the parameters of its constructor; for a function, its keyword-only
    parameters. `owner` is used in messages, such as "policy hybrid" or "wrapper thresholds". Raises
    PolicyError for a parameter without a default, or of a type that text cannot express.
    """
    hints = get_type_hints(attr.__init__ if inspect.isclass(attr) else attr)
    found = {}
    for parameter in inspect.signature(attr).parameters.values():
        if not inspect.isclass(attr) and parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        kinds = _kinds(hints.get(parameter.name))
        kind = next((k for k in kinds if k in _CONVERTIBLE), None)
        if parameter.default is parameter.empty or kind is None or len(kinds - {kind}) > 1:
            raise PolicyError(
                f"{owner}: parameter {parameter.name} needs a default and one of the "
                "types float, int, bool, str, or one of these with None"
            )
        optional = type(None) in kinds
        found[parameter.name] = Parameter(parameter.name, kind, optional, parameter.default)
    return found


def coerce_all(
    owner: str, valid: Mapping[str, Parameter], given: Mapping[str, str]
) -> dict[str, Value]:
    """Return the values of all `valid` parameters: converted from `given`, or else the defaults.

    Raises PolicyError for an unknown parameter or an invalid value. The message has `owner`, the
    name of the policy or wrapper, and the valid parameters.
    """
    names = ", ".join(str(p) for p in valid.values()) or "none"
    values = {p.name: p.default for p in valid.values()}
    for name, text in given.items():
        if name not in valid:
            hint = did_you_mean(name, valid)
            raise PolicyError(f"{owner} has no parameter {name!r}{hint}; valid: {names}")
        try:
            values[name] = valid[name].coerce(text)
        except ValueError as error:
            raise PolicyError(f"{owner}: {name}: {error}; valid: {names}") from error
    return values


def text_of(value: Value) -> str:
    """Return a parameter's value as text, as it is written in the specification of a policy."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _kinds(hint: Any) -> set[Any]:
    if isinstance(hint, type):
        return {hint}
    return set(getattr(hint, "__args__", ()))


# Errors of a user's code; others (a keyboard interrupt, a cancelled task) are not its own.
RAISABLE = (Exception, SystemExit)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object that specifications name: policies, or wrappers of policies. Lifetime:
    process.
    """

    word: str  # for people: "policy" or "wrapper"
    built_in: Mapping[str, str]  # name -> module:attr
    entry_points: str  # group
    method: str  # method of a class, or the method that a function replaces
    arguments: tuple[str, ...]  # arguments of the method, without self and keyword-only ones

    def names(self) -> list[str]:
        """Return the names that `find` accepts, built-in ones first.

        The other names come from installed packages.
        """
        others = {entry.name for entry in entry_points(group=self.entry_points)}
        return [*self.built_in, *sorted(others - self.built_in.keys())]

    def find(self, name: str) -> Callable[..., Any]:
        """Return the class or function called `name`.

        If an installed package uses a built-in name, the built-in object is returned. Raises
        PolicyError for an unknown name, and lists the valid names. Also raises PolicyError if the
        object is not of this kind, for example a wrapper in place of a policy.
        """
        owner = f"{self.word} {name}"
        attr = _import(owner, self.built_in.get(name) or self._target(name))
        if inspect.isclass(attr) and callable(getattr(attr, self.method, None)):
            return attr
        if inspect.isfunction(attr) and _positional_parameters(attr) == self.arguments:
            return attr
        asked = f"{self.method}({', '.join(self.arguments)}"
        raise PolicyError(
            f"{owner} is a {type(attr).__name__}; it must be a class with a method "
            f"{asked}), or a function {asked}, *, ...)"
        )

    def _target(self, name: str) -> str:
        if ":" in name:
            return name
        found = [e.value for e in entry_points(group=self.entry_points) if e.name == name]
        if found:
            return found[0]
        if "." in name:
            raise PolicyError(
                f"{self.word} {name}: `:attr` is missing; name a class or function of the "
                f"module, as in {name}:My{self.word.capitalize()}"
            )
        known, other = self.names(), WRAPPER if self is POLICY else POLICY
        if name in other.built_in:
            where = "alone or first" if other is POLICY else "behind a policy and a |"
            raise PolicyError(
                f"no {self.word} {name!r}: it is a {other.word}, which stands {where}"
            )
        hint = did_you_mean(name, known)
        valid = ", ".join(known)
        raise PolicyError(f"no {self.word} {name!r}{hint}; valid: {valid}, or package.module:attr")


POLICY = Kind("policy", POLICIES, "warmroute.policies", "costs", ("request", "fleet", "state"))
WRAPPER = Kind(
    *("wrapper", WRAPPERS, "warmroute.wrappers", "adjust"),
    ("costs", "request", "fleet", "state"),
)


def _import(owner: str, target: str) -> Any:
    module_name, _, attr_name = target.partition(":")
    hidden = _find(module_name.partition(".")[0])
    try:
        return getattr(importlib.import_module(module_name), attr_name)
    except ModuleNotFoundError as error:
        hint = hidden or "; install it, or name the folder it is in by PYTHONPATH"
        raise PolicyError(f"{owner}: cannot import {target}: {error}{hint}") from error
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        raise PolicyError(f"{owner}: cannot import {target}: {error}{hidden}") from error
    except RAISABLE as error:
        told = f"{type(error).__name__}: {error}"
        raise PolicyError(f"{owner}: cannot import {target}: it raised {told}") from error


def _find(package: str) -> str:
    """Let Python import the module `package` from the current folder, unless an installed module
    has its name. Return "", or a text for an error message if an installed module has the same name
    as the module of the folder.
    """
    here = Path.cwd()
    own = next((p for p in (here / package, here / f"{package}.py") if p.exists()), None)
    if own is None:
        return ""
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # no valid name, or a module without specification
        found = None
    if found is None:
        if str(here) not in sys.path:
            sys.path.append(str(here))
            importlib.invalidate_caches()
        return ""
    places = [found.origin or "", *(found.submodule_search_locations or ())]
    if any(Path(place).is_relative_to(own) for place in places if place):
        return ""
    return f"; {own} was not asked, for {package} is an installed module: give yours another name"


def _positional_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)


class NotACostError(PolicyError):
    """Raised if a cost is NaN or -inf; the message names the policy or wrapper and the row."""


class WrapperFailedError(PolicyError):
    """Raised if a wrapper's own code raised an error; the message names the wrapper and
    the error.
    """


def checked(kind: str, name: str, costs: Any, rows: int) -> Floats:
    """Return `costs` unchanged if they are float64[rows].

    Raises PolicyError for another type or shape; its message has `kind` and `name`, such as
    "policy" and "hybrid". NaN is not checked here; `pick` does so.
    """
    if not isinstance(costs, np.ndarray) or costs.dtype.char != "d":
        told = costs.dtype if isinstance(costs, np.ndarray) else type(costs).__name__
        raise PolicyError(f"{kind} {name} returned {told}; return a float64 array")
    if costs.shape != (rows,):
        raise PolicyError(
            f"{kind} {name} returned shape {costs.shape} for {rows} workers; "
            f"return one cost for each: ({rows},)"
        )
    return costs


def checked_numbers(kind: str, name: str, costs: Any, rows: int) -> Floats:
    """Return `costs` unchanged if they are float64[rows] without NaN and -inf.

    Raises PolicyError for another type or shape, and NotACostError for NaN or -inf. Messages have
    `kind` and `name`, such as "policy" and "hybrid".
    """
    numbers = checked(kind, name, costs, rows)
    try:
        lowest(numbers)
    except ValueError as error:
        raise NotACostError(f"{kind} {name}: {error}") from error
    return numbers


# Every policy accepts `temperature`, because `pick` uses it, not the policy.
TEMPERATURE = Parameter("temperature", float, optional=False, default=0.0)
Params = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class LoadedWrapper:
    """A wrapper with its parameters, which checks the costs that the wrapper returns.

    The object keeps no state between calls. Lifetime: process.
    """

    name: str  # as given
    params: Params  # all of them, defaults included
    wrapper: Wrapper

    def adjust(self, costs: Floats, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        """Return the costs as changed by the wrapper, float64[rows].

        Raises PolicyError, with the wrapper's name, if the wrapper fails or returns invalid costs.
        """
        shown = costs.view()
        shown.flags.writeable = False  # the array may be a column, or belong to the inner policy
        try:
            adjusted = self.wrapper.adjust(shown, request, fleet, state)
        except Exception as error:
            told = f"wrapper {self.name} failed: {type(error).__name__}: {error}"
            raise WrapperFailedError(told) from error
        return checked_numbers("wrapper", self.name, adjusted, len(fleet))

    def terms(
        self, costs: Floats, adjusted: Floats, request: RequestView, fleet: FleetView, state: Any
    ) -> dict[str, Floats]:
        """Return what the wrapper added to each worker's cost, and the wrapper's own terms.

        Each value is float64[rows]. An added +inf means that the wrapper excluded the worker.
        """
        added = np.zeros(len(fleet))
        np.subtract(adjusted, costs, out=added, where=~(np.isinf(costs) & np.isinf(adjusted)))
        of = getattr(self.wrapper, "terms", None)
        own = {} if of is None else of(costs, request, fleet, state)
        return {self.name: added} | {f"{self.name}.{name}": term for name, term in own.items()}


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy with its wrappers, which checks the costs that they return.

    The object keeps no state between calls. Lifetime: process.
    """

    name: str  # as given, without parameters: "hybrid", "hybrid|bounded_load"
    params: Params  # all of its own, and "wrapper.parameter" of each wrapper, defaults included
    temperature: float  # for `policies.pick.pick`; 0 = lowest cost, ties drawn
    policy: Policy
    wrappers: tuple[LoadedWrapper, ...] = ()

    @property
    def spec(self) -> str:
        """Text that loads the same policy again, with all parameters and wrappers."""
        own = {name: value for name, value in self.params.items() if "." not in name}
        inner = _spec(self.name.partition("|")[0], {**own, "temperature": self.temperature})
        return "|".join([inner, *(_spec(quoted(w.name), w.params) for w in self.wrappers)])

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        """Return the costs of the policy after all wrappers, float64[rows].

        Raises PolicyError if the policy or a wrapper returns anything else.
        """
        if not self.wrappers:
            costs = self.policy.costs(request, fleet, state)
            return checked("policy", self.name, costs, len(fleet))
        costs = self._inner_costs(request, fleet, state)
        for wrapper, its in zip(self.wrappers, state[1:], strict=True):
            costs = wrapper.adjust(costs, request, fleet, its)
        return costs

    def terms(self, request: RequestView, fleet: FleetView, state: Any) -> dict[str, Floats]:
        """Return the terms of the costs by name, float64[rows] each, to explain a decision.

        These are the terms of the policy itself, and what each wrapper added to the costs. If there
        are wrappers and the policy has no terms, its cost is shown as one term under the policy's
        name.
        """
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
        """True if the policy or one of its wrappers reads data about sessions."""
        asked = (self.policy, *(w.wrapper for w in self.wrappers))
        return any(getattr(one, "needs_sessions", False) for one in asked)

    @property
    def passes_held(self) -> bool:
        """True if the policy may hold a request although later requests may be dispatched before
        it.
        """
        return hasattr(self.policy, "asks_held")

    def asks_held(self, state: Any) -> bool:
        """Return True if the policy wants to be asked about each held request now."""
        if not self.passes_held:
            return False
        asks = getattr(self.policy, "asks_held")  # noqa: B009 - only such policies have it
        return bool(asks(state[0] if self.wrappers else state))

    def initial_state(self) -> Any:
        """Return the policy's state before the first fact, or None for a policy without a memory.

        With wrappers, the result is a tuple: the policy's state, then the state of each wrapper.
        """
        first = _initial(self.policy)
        return (first, *(_initial(w.wrapper) for w in self.wrappers)) if self.wrappers else first

    @property
    def remembers(self) -> bool:
        """True if the policy or one of its wrappers has a memory, which facts must update."""
        parts = (self.policy, *(w.wrapper for w in self.wrappers))
        return any(hasattr(part, "observe") for part in parts)

    def observe(self, fact: Any, state: Any) -> Any:
        """Return the policy's state after `fact`; without a memory, the state stays the same.

        The kinds of facts are in `policies.facts`.
        """
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
    """Turns a plain function `costs(request, fleet, state, *, ...)` into a policy.

    Lifetime: process.
    """

    function: Callable[..., Floats]
    params: Params

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        return self.function(request, fleet, state, **self.params)


@dataclass(frozen=True, slots=True)
class FunctionWrapper:
    """Turns a plain function `adjust(costs, request, fleet, state, *, ...)` into a wrapper."""

    function: Callable[..., Floats]
    params: Params

    def adjust(self, costs: Floats, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        return self.function(costs, request, fleet, state, **self.params)


def load(spec: str) -> LoadedPolicy:
    """Return the policy that `spec` describes, with its wrappers and checked parameters.

    Raises PolicyError for an unknown name (the message lists the valid ones), for an object that is
    neither a policy nor a wrapper, for a wrapper that is given twice, and for an unknown, repeated
    or invalid parameter.
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
    """Return the names of policies that `load` accepts, built-in ones first.

    The other names come from installed packages.
    """
    return POLICY.names()


def wrapper_names() -> list[str]:
    """Return the names of wrappers that `load` accepts, built-in ones first.

    The other names come from installed packages.
    """
    return WRAPPER.names()


def name_of(spec: str) -> str:
    """Return a policy's specification without parameters, such as "hybrid|bounded_load".

    The names are not checked.
    """
    return "|".join(part.partition("?")[0] for part in spec.split("|"))


def quoted(name: str) -> str:
    """Return a policy's name with special characters escaped, as in a specification."""
    return quote(name, safe=":-")


def _load(
    kind: Kind, text: str, function: Callable[..., Any], extra: Mapping[str, Parameter]
) -> tuple[str, dict[str, Value], Any]:
    name, _, query = text.partition("?")
    name = unquote(name).strip()
    owner = f"{kind.word} {name}"
    attr = kind.find(name)
    values = coerce_all(owner, {**parameters_of(owner, attr), **extra}, _pairs(owner, query))
    own = {key: value for key, value in values.items() if key not in extra}
    if not inspect.isclass(attr):
        return name, values, function(attr, own)
    try:
        return name, values, attr(**own)
    except ValueError as error:  # its own validation
        raise PolicyError(f"{owner}: {error}") from error
    except RAISABLE as error:
        told = f"cannot be made, it raised {type(error).__name__}: {error}"
        raise PolicyError(f"{owner}: {told}") from error


def _pairs(owner: str, query: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = (unquote(piece) for piece in part.partition("="))
        if not equals:
            raise PolicyError(f"{owner}: {part!r} is not of the form key=value")
        if key in pairs:
            raise PolicyError(f"{owner}: parameter {key} is given twice")
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
