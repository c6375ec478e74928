"""From a name to the class or function behind it: a built-in's, an entry point's, module:attr."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from policies import POLICIES, WRAPPERS
from policies.parameters import PolicyError

# What somebody's code may raise. The rest (a keyboard's interrupt, a cancelled task) is not its.
RAISABLE = (Exception, SystemExit)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a name may stand for: a policy, or a wrapper round one. Lifetime: process."""

    word: str  # for people: "policy" or "wrapper"
    built_in: Mapping[str, str]  # name -> module:attr
    entry_points: str  # group
    method: str  # of a class, or what a function stands for
    arguments: tuple[str, ...]  # of either, without self and what is keyword-only

    def names(self) -> list[str]:
        """Names that `find` knows: the built-ins, then the installed entry points."""
        others = {entry.name for entry in entry_points(group=self.entry_points)}
        return [*self.built_in, *sorted(others - self.built_in.keys())]

    def find(self, name: str) -> Callable[..., Any]:
        """The class or function behind a name. An entry point cannot shadow a built-in.

        Raises PolicyError for an unknown name, with the valid ones, and for what is none.
        """
        who = f"{self.word} {name}"
        attr = _import(who, self.built_in.get(name) or self._target(name))
        if inspect.isclass(attr) and callable(getattr(attr, self.method, None)):
            return attr
        if inspect.isfunction(attr) and _asked_with(attr) == self.arguments:
            return attr
        asked = f"{self.method}({', '.join(self.arguments)}"
        raise PolicyError(
            f"{who} is a {type(attr).__name__}; it must be a class with a method "
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
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        valid = ", ".join(known)
        raise PolicyError(f"no {self.word} {name!r}{hint}; valid: {valid}, or package.module:attr")


POLICY = Kind("policy", POLICIES, "warmroute.policies", "costs", ("request", "fleet", "state"))
WRAPPER = Kind(
    *("wrapper", WRAPPERS, "warmroute.wrappers", "adjust"),
    ("costs", "request", "fleet", "state"),
)


def _import(who: str, target: str) -> Any:
    module_name, _, attr_name = target.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attr_name)
    except ModuleNotFoundError as error:
        raise PolicyError(
            f"{who}: cannot import {target}: {error}; install it, or name the folder it is in by "
            "PYTHONPATH"
        ) from error
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        raise PolicyError(f"{who}: cannot import {target}: {error}") from error
    except RAISABLE as error:
        told = f"{type(error).__name__}: {error}"
        raise PolicyError(f"{who}: cannot import {target}: it raised {told}") from error


def _asked_with(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
