"""What workers tell of their load and their caches: facts after which nobody is asked again."""

from __future__ import annotations

from collections.abc import Callable

from policies import facts
from router.core.actions import Action, Resync
from router.core.ledger import Ledger
from router.core.roster import Roster


class WorkerReports:
    """The part of the core that takes these facts. Lifetime: process."""

    ledger: Ledger
    roster: Roster
    _observe: Callable[[facts.Fact], None]

    def on_load_report(self, fact: facts.LoadReport) -> list[Action]:
        """A worker told its load: what we did not send it is others' load."""
        self._observe(fact)
        self.ledger.advance(fact.now_s)
        self.roster.report(fact, self.ledger)
        return []

    def on_kv_events(self, fact: facts.KvEvents) -> list[Action]:
        """A worker's cache changed."""
        self._observe(fact)
        from_seq = self.roster.kv_events(fact)
        return [] if from_seq is None else [Resync(fact.worker_id, from_seq)]

    def on_replay_end(self, fact: facts.ReplayEnd) -> list[Action]:
        """A replay is over; what it left out is asked for once more, or its hits are unknown."""
        self._observe(fact)
        from_seq = self.roster.replay_end(fact)
        return [] if from_seq is None else [Resync(fact.worker_id, from_seq)]

    def on_kv_copied(self, fact: facts.KvCopied) -> list[Action]:
        """A peer told all that it knows of a worker's cache."""
        from_seq = self.roster.kv_copied(fact)
        return [] if from_seq is None else [Resync(fact.worker_id, from_seq)]

    def on_kv_heard(self, fact: facts.KvHeard) -> list[Action]:
        """A worker's events reach us through a peer, or do no more."""
        self.roster.kv_heard(fact)
        return []
