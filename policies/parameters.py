"""Parameters of a policy: read off its signature, coerced from text, refused with help."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

Value = float | int | bool | str | None
_TRUTH = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
_CONVERTIBLE = (float, int, bool, str)


class PolicyError(ValueError):
    """A policy's name, parameter or answer is wrong; the message says what would be right."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: its kind, whether it may be none, its default. Lifetime: process."""

    name: str
    kind: type  # float, int, bool or str
    optional: bool  # `float | None` and the like: the word "none" gives None
    default: Value

    def __str__(self) -> str:
        kind = self.kind.__name__ + (" or none" if self.optional else "")
        return f"{self.name} ({kind}, default {text_of(self.default)})"

    def coerce(self, text: str) -> Value:
        """The value that `text` spells. Raises ValueError when it spells none of this kind."""
        if self.optional and text.lower() == "none":
            return None
        if self.kind is bool:
            if text.lower() not in _TRUTH:
                raise ValueError(f"{text!r} is neither true nor false")
            return _TRUTH[text.lower()]
        value: Value = self.kind(text)
        return value


def parameters_of(who: str, attr: Callable[..., Any]) -> dict[str, Parameter]:
    """The parameters of a class (all of its constructor's) or function (keyword-only).

    `who`, for messages: "policy hybrid", "wrapper thresholds".

    Raises PolicyError for one without a default or of a type that text cannot spell.
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
                f"{who}: parameter {parameter.name} needs a default and one of the "
                "types float, int, bool, str, or one of these with None"
            )
        optional = type(None) in kinds
        found[parameter.name] = Parameter(parameter.name, kind, optional, parameter.default)
    return found


def coerce_all(
    who: str, valid: Mapping[str, Parameter], given: Mapping[str, str]
) -> dict[str, Value]:
    """Every parameter's value: `given` text coerced, defaults for the rest.

    Raises PolicyError naming `who`, the parameter and the valid ones.
    """
    names = ", ".join(str(p) for p in valid.values()) or "none"
    values = {p.name: p.default for p in valid.values()}
    for name, text in given.items():
        if name not in valid:
            raise PolicyError(f"{who} has no parameter {name!r}; valid: {names}")
        try:
            values[name] = valid[name].coerce(text)
        except ValueError as error:
            raise PolicyError(f"{who}: {name}: {error}; valid: {names}") from error
    return values


def text_of(value: Value) -> str:
    """A value as it is written in a specification."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _kinds(hint: Any) -> set[Any]:
    if isinstance(hint, type):
        return {hint}
    return set(getattr(hint, "__args__", ()))
