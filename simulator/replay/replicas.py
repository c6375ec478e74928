"""Several routers in front of one pool: each request comes through one of them, all hear the pool.

What they tell each other (`router.replicas`) arrives late, or, where they do not share, never. For
whoever replays they stand for one decision core.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from policies import facts
from router.core.contract.actions import Action
from router.core.core import RouterCore, take
from router.replicas.sharing import Sharing
from simulator.replay.agenda import Agenda, Rank

CarryOut = Callable[[int, list[Action]], None]
OF_A_REQUEST = (
    *(facts.Arrival, facts.Prefilled, facts.FirstToken, facts.Progress, facts.Finish),
    facts.Failure,
)


class Replicas:
    """Lifetime: replay. `lag_ns` passes until what one core says is heard by all others."""

    def __init__(self, cores: list[RouterCore], agenda: Agenda, lag_ns: int, seed: int) -> None:
        self._cores = cores
        self._agenda, self._lag_ns = agenda, lag_ns
        self._random = Random(f"{seed}/replicas")
        self._owners: dict[int, int] = {}  # request -> which core has it
        self._sharing: list[Sharing] = []
        self._said: list[bool] = [False] * len(cores)  # its messages leave soon
        self.carry_out: CarryOut = lambda now_ns, actions: None

    def share(self) -> None:
        """Let them tell each other, from now on."""
        for number, core in enumerate(self._cores):
            tell = partial(self._peer_told, number)
            sharing = Sharing(f"r{number}@0", core, tell)
            self._sharing.append(sharing)
            sharing.joined(0.0)
        for number in range(len(self._cores)):
            self._speak(0, number)

    def tell(self, fact: facts.Fact) -> list[Action]:
        """A request's facts go to the router that has it; those of workers and time to all."""
        if not isinstance(fact, OF_A_REQUEST):
            return [action for n in range(len(self._cores)) for action in self._told(n, fact)]
        if isinstance(fact, facts.Arrival):  # clients, or what balances them, take any router
            self._owners[fact.request_id] = self._random.randrange(len(self._cores))
        number = self._owners[fact.request_id]
        if isinstance(fact, facts.Finish):
            del self._owners[fact.request_id]
        return self._told(number, fact)

    # --- what they say to each other --------------------------------------------------------

    def _told(self, number: int, fact: facts.Fact) -> list[Action]:
        actions = take(self._cores[number], fact)
        if self._sharing and not self._said[number]:
            self._said[number] = True
            due_ns = self._agenda.now_ns + self._lag_ns
            self._agenda.at(due_ns, Rank.ANSWER, self._speak, number)
        return actions

    def _speak(self, now_ns: int, number: int) -> None:
        self._said[number] = False
        now_s, speaker = now_ns / 1e9, self._sharing[number]
        while (payload := speaker.outgoing(now_s)) is not None:
            for peer in self._sharing:
                if peer is not speaker:
                    peer.incoming(speaker.identity, payload, now_s)

    def _peer_told(self, number: int, fact: facts.PeerFact) -> None:
        actions = take(self._cores[number], fact)
        if actions:
            self.carry_out(self._agenda.now_ns, actions)

    # --- what is asked of a core ------------------------------------------------------------

    @property
    def inflight_requests(self) -> int:
        """Accepted and unfinished, of all of them."""
        return sum(core.inflight_requests for core in self._cores)

    @property
    def retries(self) -> int:
        """Retries of all of them."""
        return sum(core.counters.retries for core in self._cores)

    @property
    def holds(self) -> int:
        """Holds of all of them."""
        return sum(core.counters.holds for core in self._cores)
