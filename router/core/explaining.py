"""What would be decided now: questions after which all is as it was."""

from __future__ import annotations

from policies import facts
from router.core.actions import Reject
from router.core.chooser import Choice, Chooser, Withheld
from router.core.draws import draw_of
from router.core.following import Following
from router.core.hold_queue import Pending


class Explaining:
    """The part of the core that answers them. Lifetime: process."""

    chooser: Chooser
    following: Following
    _seed: int
    _serial: int
    _pending: dict[int, Pending]

    def explain(self, fact: facts.Arrival) -> Choice | Withheld | Reject:
        """What would be decided for this request, by loads as of the last fact; all stays as it is.

        Not even the queues drain: in one step more they end in other digits, and a recording of
        the facts would not repeat what was decided.
        """
        pending = Pending(fact, self._serial, draw_of(self._seed, self._serial))
        self.following.look(pending)
        return self.chooser.explain(pending, fact.now_s, "policy")

    def explain_held(self, request_id: int, now_s: float) -> Choice | Withheld | Reject | None:
        """Why this request waits, as of now; None where it does not."""
        pending = self._pending.get(request_id)
        if pending is None or not pending.held:
            return None
        return self.chooser.explain(pending, now_s, "held")
