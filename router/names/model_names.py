"""Chooses the model and the revision for a model name of a client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from math import log as natural_log
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from router.body.paths import Path
from router.body.scan import LONG_BYTES
from router.config.extras import NameSettings
from router.core.workers.table import WorkerTable
from router.names.answers import AnswerEditor, editor_of
from router.names.beginnings import beginning_of
from router.names.metrics import NameMetrics
from router.names.rules import NameRule, NameRules, NameTarget
from router.record.named import NamedModel
from router.record.request_record import RequestRecord

log = logging.getLogger(__name__)


class ModelNames:
    """Finds the model and the revision for a name, by the rules of the configuration. Lifetime:
    process.

    It is the `NameResolver` of the request path.
    """

    def __init__(
        self,
        settings: NameSettings,
        workers: WorkerTable,
        metrics: NameMetrics,
        known: Callable[[str], bool] | None = None,
    ) -> None:
        """Use the rules in `settings`. `known` returns whether a name is the name of a model, even
        if no worker serves that model now.
        """
        self._workers = workers
        self._known = known or self._served
        self._version = -1  # of the workers, when these were asked
        self._open: dict[tuple[str, str | None], bool] = {}  # by model and revision
        self._open_rules: dict[str, bool] = {}  # by the rule's name
        self._hidden: list[str] | None = None  # as of that version, as are the next two
        self._cards_of: Sequence[dict[str, Any]] = ()  # models' cards, from which those are
        self._cards: list[dict[str, Any]] | None = None  # of names
        self._logged = set[str]()  # names of rules that are also models' names
        self._settings = settings
        self.rules = NameRules(settings)
        self._metrics = metrics
        self._expect()

    def renew(self, settings: NameSettings) -> None:
        """Use the rules in `settings` from now on."""
        if settings != self._settings:
            self.rules = NameRules(settings)
            self._settings, self._version = settings, -1
            self._logged.clear()
            self._metrics.forget(self.rules.names)
            self._expect()

    def _expect(self) -> None:
        """Show the counts of all targets among which a rule divides requests, even while they are
        zero.
        """
        for rule in self.rules.exact.values():
            if len(rule.targets) > 1:
                self._metrics.expect(rule)

    async def choose(
        self, requested: str, tenant: str | None, session: str | None, body: bytes
    ) -> NamedModel | None:
        rule = self._rule(requested)
        if rule is None:
            return None
        whose: bytes | None = None
        while True:
            targets = self._open_targets(rule)
            target = targets[0]
            if len(targets) > 1:
                if whose is None:
                    whose = await _identity(tenant, session, body)
                target = heaviest(rule.name, whose, targets)
            following = self.rules.follows(rule, target)
            if following is None:
                return NamedModel(requested, rule.name, target.model, target.revision)
            rule = following

    def stands_for(self, name: str) -> str:
        rule = self._rule(name)
        while rule is not None:
            target = max(self._open_targets(rule), key=lambda one: one.weight)
            name, rule = target.model, self.rules.follows(rule, target)
        return name

    def open_models(self, requested: str) -> frozenset[str]:
        found, rules, seen = set[str](), [self._rule(requested)], set[str]()
        while rules:
            if (rule := rules.pop()) is None or rule.name in seen:
                continue
            seen.add(rule.name)
            for target in rule.targets:
                if not (target.weight and self._takes(rule, target)):
                    continue
                following = self.rules.follows(rule, target)
                if following is None:
                    found.add(target.model)
                else:
                    rules.append(following)
        return frozenset(found)

    def with_cards(self, cards: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        self._look()
        if self._cards is None or self._cards_of != cards:
            by_model = {card["id"]: card for card in cards}
            others = (name for name in self.rules.exact if name not in by_model)
            self._cards = [
                _card_of(name, model, by_model.get(model))
                for name, model in ((name, self.stands_for(name)) for name in others)
            ]
            self._cards_of = [*cards]
        return [*cards, *self._cards]

    def card(
        self, name: str, of_model: Callable[[str], dict[str, Any] | None]
    ) -> dict[str, Any] | None:
        if self.rules.exact_rule(name) is None:
            return None
        model = self.stands_for(name)
        return _card_of(name, model, of_model(model))

    def count(self, record: RequestRecord) -> None:
        self._metrics.count(record)

    def editor(self, named: NamedModel, path: Path) -> AnswerEditor:
        assert named.asked is not None, "no other answer is edited"
        return editor_of(path, named.asked)

    def _rule(self, requested: str) -> NameRule | None:
        rules = self.rules
        rule = rules.exact_rule(requested)
        if rule is None:
            return None if self._known(requested) else rules.pattern_rule(requested)
        if requested not in self._logged and not rule.splits_itself and self._served(requested):
            self._logged.add(requested)
            line = "the name %r has a rule, and workers serve a model of that name: the rule counts"
            log.warning(line, requested[:200])
        return rule

    def models(self) -> frozenset[str]:
        """Return the models that names may stand for."""
        return self.rules.models

    def hidden_models(self) -> list[str]:
        self._look()
        if self._hidden is None:
            self._hidden = sorted(
                name
                for name, rule in self.rules.exact.items()
                if not rule.splits_itself and self._served(name)
            )
        return self._hidden

    def _served(self, model: str) -> bool:
        return self._workers.serves(model)

    def _look(self) -> None:
        """Drop what was computed from the workers if any worker has changed since."""
        if self._version != self._workers.version:
            self._version = self._workers.version
            self._open.clear()
            self._open_rules.clear()
            self._hidden = self._cards = None

    def _open_targets(self, rule: NameRule) -> tuple[NameTarget, ...]:
        """Return the targets among which the rule's requests are divided now: those that have a
        worker which takes requests.

        If no target has such a worker, all targets are returned.
        """
        if len(rule.targets) == 1:
            return rule.targets
        weighted = tuple(one for one in rule.targets if one.weight)
        return tuple(one for one in weighted if self._takes(rule, one)) or weighted

    def _takes(self, rule: NameRule, target: NameTarget) -> bool:
        """Return True if at least one worker takes requests for the target now."""
        self._look()
        following = self.rules.follows(rule, target)
        if following is not None:
            name = following.name
            if (open_now := self._open_rules.get(name)) is None:
                targets = (one for one in following.targets if one.weight)
                open_now = any(self._takes(following, one) for one in targets)
                self._open_rules[name] = open_now
            return open_now
        key = target.model, target.revision
        known = self._open.get(key)
        if known is None:
            known = self._open[key] = self._served(target.model) and any(
                worker.takes_requests
                for worker in self._workers.serving(target.model)
                if target.revision is None or worker.facts.revision == target.revision
            )
        return known


def _card_of(name: str, model: str, of_model: dict[str, Any] | None) -> dict[str, Any]:
    """Return the model card of a name, with the context limit and the parent of its model."""
    card = {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "warmroute",
        "root": model,
        "parent": None,
    }
    shown = ("parent", "max_model_len")
    return card | {key: of_model[key] for key in shown if of_model and key in of_model}


def heaviest(rule: str, caller: bytes, targets: Sequence[NameTarget]) -> NameTarget:
    """Return the target that a weighted draw chooses; the draw is always the same for the same
    `rule` and `caller`.

    This is weighted rendezvous hashing: each target's draw depends on that target alone, so that a
    changed weight moves only requests to or from its target.
    """
    seed = xxh3_64_intdigest(msgspec.msgpack.encode((rule, caller)))

    def cost(target: NameTarget) -> float:
        drawn = xxh3_64_intdigest(str(target).encode("utf-8", "surrogatepass"), seed)
        return -natural_log((drawn + 0.5) / 2.0**64) / target.weight

    return min(targets, key=cost)


async def _identity(tenant: str | None, session: str | None, body: bytes) -> bytes:
    """Return bytes that are the same for all requests of a session, or of a conversation if there
    is no session.
    """
    if session is not None:
        return msgspec.msgpack.encode((tenant, session))
    if len(body) < LONG_BYTES:
        begun = beginning_of(body)
    else:
        begun = await asyncio.to_thread(beginning_of, body)
    return msgspec.msgpack.encode((tenant, None, begun))
