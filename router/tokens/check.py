"""Checks that the router makes the same token ids of a model's prompts as the model's workers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from router.core.workers.hit_modes import TokenState

log = logging.getLogger(__name__)

MAX_MODELS = 4_096  # that are kept account of
_STRIKES_OUT = 3.0
_PAST_STRIKES = 2.0  # after its time aside, one more is enough
_FORGIVEN = 0.1  # by a prompt that agrees: one in eleven may differ, which a client could contrive
_LONGEST_RECHECK_S = 3_600.0
_LINE = "model %r: its prompts are placed by text from now on: %s"


@dataclass(slots=True)
class _Account:
    """The results of comparing the router's token ids of one model with its workers'. Lifetime:
    process.
    """

    strikes: float = 0.0
    aside_s: float = 0.0  # how long it was put aside the last time
    until_s: float | None = None  # put aside by its traffic until then
    failing: set[int] = field(default_factory=set)  # workers whose probes differ
    failing_tools: set[int] = field(default_factory=set)  # ... where a chat has tools, only
    warned: bool = False
    told_tools: bool = False


class TokenCheck:
    """Decides for each model whether the router's own token ids are trusted. Lifetime: process.

    `clock` returns seconds. `recheck_s` is for how long a model is not trusted at first; the time
    doubles, up to an hour, each time that the counts of served prompts differ again.
    """

    def __init__(
        self, clock: Callable[[], float], recheck_s: Callable[[], float], line: str = _LINE
    ) -> None:
        """Start by trusting all models. `line` is the log line, with the reason, for a model that
        is no longer trusted.
        """
        self._clock = clock
        self._line = line
        self._recheck_s = recheck_s
        self._accounts: dict[str, _Account] = {}
        self.mismatches: Counter[str] = Counter()  # by model

    def trusts(self, model: str, tools: bool = False) -> bool:
        """Return whether the router's token ids are used for prompts of `model` now; `tools` says
        that the chat has tools.
        """
        account = self._accounts.get(model)
        if account is not None and tools and account.failing_tools:
            return False
        if account is None or (account.until_s is None and not account.failing):
            return True
        if account.until_s is not None and self._clock() >= account.until_s:
            account.until_s = None
            account.strikes = _PAST_STRIKES
        return account.until_s is None and not account.failing

    def state(self, model: str) -> TokenState:
        """Return whether the router's token ids of `model` agree with what its workers reported:
        "unchecked", "differ", "tools" (they differ only for chats with tools) or "checked".
        """
        if model not in self._accounts:
            return "unchecked"
        if not self.trusts(model):
            return "differ"
        return "checked" if self.trusts(model, tools=True) else "tools"

    def exact(self) -> Iterator[tuple[str, bool]]:
        """Yield the name of every checked model, and whether its token ids are trusted."""
        for model in list(self._accounts):
            yield model, self.trusts(model)

    def counted(self, model: str, own: int, reported: int) -> None:
        """Note that a worker counted `reported` tokens in a prompt in which the router counted
        `own`.
        """
        account = self._account(model)
        if account is None:
            return
        if own == reported:
            account.strikes = max(account.strikes - _FORGIVEN, 0.0)
            if account.strikes == 0.0:
                account.aside_s = 0.0
            return
        self.mismatches[model] += 1
        account.strikes += 1.0
        if account.strikes < _STRIKES_OUT or account.until_s is not None:
            return
        account.aside_s = min(max(2 * account.aside_s, self._recheck_s()), _LONGEST_RECHECK_S)
        account.until_s = self._clock() + account.aside_s
        what = f"the last prompt has {own} tokens by our count, {reported} by its worker's"
        self._warn_once(model, account, what)

    def probed(self, model: str, worker_id: int, difference: str | None) -> None:
        """Note how a worker's token ids of the probes differ from the router's; `difference` is
        None if they are equal.
        """
        account = self._account(model)
        if account is None:
            return
        if difference is None:
            account.failing.discard(worker_id)
            if not account.failing:
                account.until_s, account.strikes, account.warned = None, 0.0, False
            return
        self.mismatches[model] += 1
        account.failing.add(worker_id)
        self._warn_once(model, account, f"worker {worker_id}: {difference}")

    def probed_tools(self, model: str, worker_id: int, difference: str | None) -> None:
        """Note how a worker's token ids of the probe with tools differ, if those of all other
        probes are equal. Engines pass tools to the chat template in different forms.
        """
        account = self._account(model)
        if account is None:
            return
        if difference is None:
            account.failing_tools.discard(worker_id)
            account.told_tools = account.told_tools and bool(account.failing_tools)
            return
        self.mismatches[model] += 1
        account.failing_tools.add(worker_id)
        if not account.told_tools:
            account.told_tools = True
            line = "model %r: its chats with tools are placed by text from now on: worker %d: %s"
            log.warning(line, model, worker_id, difference)

    def forget(self, worker_id: int) -> None:
        """Drop the probe results of a worker that is gone, or that serves another model now."""
        for account in self._accounts.values():
            account.failing.discard(worker_id)
            account.failing_tools.discard(worker_id)

    def drop(self, models: Iterable[str]) -> None:
        """Drop the counts of models that no worker serves any more."""
        for model in models:
            self._accounts.pop(model, None)

    def _account(self, model: str) -> _Account | None:
        if model not in self._accounts:
            if len(self._accounts) >= MAX_MODELS:
                return None
            self._accounts[model] = _Account()
        return self._accounts[model]

    def _warn_once(self, model: str, account: _Account, what: str) -> None:
        if not account.warned:
            account.warned = True
            log.warning(self._line, model, what)
