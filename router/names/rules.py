"""Defines the rules that map a client's model name to one model, or to one of several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from router.config.extras import NameSettings

_NAME_CHARS = 1_024  # as of a request's model
_PATTERNS = 1_000
_TARGETS = 64  # of one name
_MOST_WEIGHT = 1e6
_LONGEST_WAY = 8  # from a name to a model, by way of other names
_MEMO = 4_096  # most names whose patterns are remembered
_ALIAS = "NAME=MODEL or NAME=MODEL@REVISION, as in gpt-4o=llama"
_USE_TARGETS = "for several with weights use names.targets"
_WEIGHTED = "NAME=MODEL@REVISION:WEIGHT,..., as in chat=llama@v1:90,llama@v2:10"


@dataclass(frozen=True, slots=True)
class NameTarget:
    """One of the models to which a naming rule sends requests. Lifetime: until the next reload."""

    model: str
    revision: str | None = None  # None: any
    weight: float = 1.0

    def __str__(self) -> str:
        if self.revision is None:
            return f"{self.model}@" if "@" in self.model else self.model
        return f"{self.model}@{self.revision}"


@dataclass(frozen=True, slots=True)
class NameRule:
    """A model name, or a pattern of names, and the models to which it is mapped. Lifetime: until
    the next reload.
    """

    name: str
    targets: tuple[NameTarget, ...]

    @property
    def splits_itself(self) -> bool:
        """True if the name is also the model of one of its targets, for example when revisions of
        one model share its requests.
        """
        return any(target.model == self.name for target in self.targets)


class Pattern:
    """A pattern of model names in which each `*` matches any text. Lifetime: until the
    next reload.
    """

    __slots__ = ("_first", "_last", "_middle", "literal_chars", "rule")

    def __init__(self, rule: NameRule) -> None:
        self.rule = rule
        self._first, *middle, self._last = rule.name.split("*")
        self._middle = [part for part in middle if part]
        self.literal_chars = len(rule.name) - rule.name.count("*")

    def matches(self, name: str) -> bool:
        """Return True if the pattern matches `name`. The time is linear, because each part is
        searched once.
        """
        if len(name) < self.literal_chars or not name.startswith(self._first):
            return False
        if not name.endswith(self._last):
            return False
        at, end = len(self._first), len(name) - len(self._last)
        for part in self._middle:
            at = name.find(part, at, end)
            if at < 0:
                return False
            at += len(part)
        return True


class NameRules:
    """All naming rules of a configuration. Lifetime: until the next reload.

    Raises ValueError for rules that contradict each other.
    """

    def __init__(self, settings: NameSettings) -> None:
        self._exact: dict[str, NameRule] = {}
        patterns: list[Pattern] = []
        seen = set[str]()
        for rule in _parsed(settings):
            if rule.name in seen:
                raise ValueError(f"{_shown(rule.name)} is given twice; give each name once")
            seen.add(rule.name)
            if "*" in rule.name:
                patterns.append(Pattern(rule))
            else:
                self._exact[rule.name] = rule
        if len(patterns) > _PATTERNS:
            raise ValueError(f"{len(patterns)} names have a *; at most {_PATTERNS} may")
        self._patterns = sorted(patterns, key=lambda pattern: -pattern.literal_chars)
        self._memo: dict[str, NameRule | None] = {}
        self._check_ways()
        targets = {
            target.model
            for rule in (*self._exact.values(), *(pattern.rule for pattern in patterns))
            for target in rule.targets
            if self.follows(rule, target) is None
        }
        self.models = frozenset(targets)  # the models that names resolve to
        self.names = frozenset(seen)  # of rules, patterns included

    @property
    def exact(self) -> Mapping[str, NameRule]:
        """The rules for names without `*`, by name."""
        return self._exact

    def exact_rule(self, name: str) -> NameRule | None:
        """Return the rule for exactly this name, or None."""
        return self._exact.get(name)

    def pattern_rule(self, name: str) -> NameRule | None:
        """Return the rule of the matching pattern with the most characters other than
        `*`, or None.
        """
        if not self._patterns:
            return None
        if name in self._memo:
            return self._memo[name]
        found = next((one.rule for one in self._patterns if one.matches(name)), None)
        if len(self._memo) >= _MEMO:
            self._memo.clear()
        self._memo[name] = found
        return found

    def follows(self, rule: NameRule, target: NameTarget) -> NameRule | None:
        """Return the rule of a target that is itself a name with a rule; None if the target is a
        model.

        A target with a revision is a model, and so is a target with the name of the rule itself.
        """
        if target.revision is not None or target.model == rule.name:
            return None
        return self._exact.get(target.model)

    def _after(self, rule: NameRule) -> Iterator[NameRule]:
        for target in rule.targets:
            if (following := self.follows(rule, target)) is not None:
                yield following

    def _check_ways(self) -> None:
        """Raise ValueError for a name that leads back to itself, or that leads to a model only
        through too many other names.
        """
        steps: dict[str, int] = {}  # from a name to its models, at most
        for start in self._exact.values():
            way = {} if start.name in steps else {start.name: self._after(start)}
            while way:
                name, ahead = next(reversed(way.items()))
                following = next(ahead, None)
                if following is None:
                    del way[name]
                    after = (steps[one.name] for one in self._after(self._exact[name]))
                    steps[name] = 1 + max(after, default=0)
                    if steps[name] > _LONGEST_WAY:
                        what = f"leads to a model by more than {_LONGEST_WAY} names"
                        raise ValueError(f"{_shown(name)} {what}; let it name the model")
                elif following.name in way:
                    names = list(way)
                    circle = [*names[names.index(following.name) :], following.name]
                    shown = " -> ".join(map(_shown, circle[:8])) + (" ..." if circle[8:] else "")
                    raise ValueError(f"names lead in a circle: {shown}; let one name a model")
                elif following.name not in steps:
                    way[following.name] = self._after(following)


def alias_of(line: str) -> NameRule:
    """Parse a rule of the form `NAME=MODEL` or `NAME=MODEL@REVISION`. Raises ValueError."""
    name, model = _halves(line, _ALIAS)
    if "," in model:
        raise ValueError(f"{_shown(line)}: an alias is one model; {_USE_TARGETS}")
    return NameRule(name, (_target(model, line, _ALIAS),))


def weighted_of(line: str) -> NameRule:
    """Parse a rule of the form `NAME=MODEL@REVISION:WEIGHT,...`. Raises ValueError."""
    name, rest = _halves(line, _WEIGHTED)
    parts = rest.split(",")
    if len(parts) > _TARGETS:
        raise ValueError(f"{_shown(name)} has {len(parts)} targets; at most {_TARGETS} are allowed")
    targets = list[NameTarget]()
    for part in parts:
        model, colon, number = part.rpartition(":")
        if not colon:
            raise ValueError(f"{_shown(line)}: {_shown(part)} has no weight; write {_WEIGHTED}")
        target = _target(model, line, _WEIGHTED, _weight(number, line))
        if any((target.model, target.revision) == (one.model, one.revision) for one in targets):
            raise ValueError(f"{_shown(line)}: {_shown(str(target))} is there twice")
        targets.append(target)
    if not any(target.weight for target in targets):
        raise ValueError(f"{_shown(line)}: all weights are 0; give one of them more")
    return NameRule(name, tuple(targets))


def lines_of(value: Any, weights: bool = True) -> list[Any] | tuple[Any, ...]:
    """Return the naming rules of a configuration file as lines: a list unchanged, and a mapping of
    names as one line for each name.

    `weights` True means that a name may have a mapping of models to weights. Raises ValueError for
    a mapping whose values are neither texts nor mappings of weights.
    """
    if not isinstance(value, dict):
        return value  # type: ignore[no-any-return]
    lines = list[str]()
    for name, meaning in value.items():
        if isinstance(meaning, dict):
            if not weights:
                raise ValueError(f"{_shown(str(name))}: an alias is one model; {_USE_TARGETS}")
            meaning = ",".join(f"{model}:{weight}" for model, weight in meaning.items())
        if not (isinstance(name, str) and isinstance(meaning, str)):
            raise ValueError(f"{_shown(str(name))}: expected a model, or models with their weights")
        if "=" in name:
            raise ValueError(f"{_shown(name)}: a name has no =")
        lines.append(f"{name}={meaning}")
    return lines


def _parsed(settings: NameSettings) -> Iterator[NameRule]:
    yield from map(alias_of, settings.aliases)
    yield from map(weighted_of, settings.targets)


def _halves(line: str, form: str) -> tuple[str, str]:
    name, _, rest = line.partition("=")
    name, rest = name.strip(), rest.strip()
    if not (name and rest):
        raise ValueError(f"{_shown(line)} is not {form}")
    _check_chars((name,))
    return name, rest


def _target(text: str, line: str, form: str, weight: float = 1.0) -> NameTarget:
    text = text.strip()
    model, at, revision = text.rpartition("@")
    if not at or not model:  # a name may begin with @, and one with @ in it ends with one
        model, revision = text, ""
    if not model.strip("@"):
        raise ValueError(f"{_shown(line)} is not {form}")
    if "*" in text:
        raise ValueError(f"{_shown(line)}: a target is one model; * may stand in NAME only")
    _check_chars((model, revision))
    return NameTarget(model, revision or None, weight)


def _weight(number: str, line: str) -> float:
    try:
        weight = float(number)
    except ValueError:
        weight = -1.0
    if not (isfinite(weight) and 0.0 <= weight <= _MOST_WEIGHT):
        what = f"a weight must be 0..{_MOST_WEIGHT:.0f}, is {number.strip()[:20]!r}"
        raise ValueError(f"{_shown(line)}: {what}")
    return weight


def _check_chars(names: Iterable[str]) -> None:
    for name in names:
        if len(name) > _NAME_CHARS:
            raise ValueError(f"{_shown(name)} has more than {_NAME_CHARS} characters")
        if not name.isprintable():
            raise ValueError(f"{_shown(name)} has characters that cannot be shown")


def _shown(text: str) -> str:
    return repr(text[:100])
