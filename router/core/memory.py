"""What a policy with memory is shown: every fact, whatever its code makes of it."""

from __future__ import annotations

from collections.abc import Callable

from policies.facts import Fact
from policies.parameters import PolicyError
from router.core.chooser import Chooser
from router.core.counters import CoreCounters


def raising(error: PolicyError) -> None:
    """For whoever wants a policy's failure to end all."""
    raise error


class PolicyMemory:
    """Shows facts to the policy in use, and outlives its failures. Lifetime: process."""

    def __init__(
        self, chooser: Chooser, counters: CoreCounters, report: Callable[[PolicyError], None]
    ) -> None:
        self._chooser = chooser
        self._counters = counters
        self._report = report

    def observe(self, fact: Fact) -> None:
        """Let a policy with memory see a fact; where its code fails, its memory stays."""
        if not self._chooser.remembers:
            return
        try:
            self._chooser.observe(fact)
        except PolicyError as error:
            self.failed(error)

    def failed(self, error: PolicyError) -> None:
        """Count and report a failure of the policy's code."""
        self._counters.policy_failures += 1
        self._report(error)
