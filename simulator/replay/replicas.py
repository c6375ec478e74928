"""Several routers in front of one pool.

Each request goes through one router, and all routers receive the pool's events. Messages between
the routers (`router.replicas`) arrive late, or never if the routers do not share state. The rest of
the replay uses them as if they were one decision core.
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
    """The decision cores of several routers. Lifetime: replay.

    A message of one core reaches all others after `lag_ns`.
    """

    def __init__(self, cores: list[RouterCore], agenda: Agenda, lag_ns: int, seed: int) -> None:
        self._cores = cores
        self._agenda, self._lag_ns = agenda, lag_ns
        self._random = Random(f"{seed}/replicas")
        self._owners: dict[int, int] = {}  # request -> which core has it
        self._sharing: list[Sharing] = []
        self._is_send_due: list[bool] = [False] * len(
            cores
        )  # whether its messages are about to be sent
        self.carry_out: CarryOut = lambda now_ns, actions: None

    def share(self) -> None:
        """Let the routers share state from now on."""
        for number, core in enumerate(self._cores):
            tell = partial(self._take_peer_fact, number)
            sharing = Sharing(f"r{number}@0", core, tell)
            self._sharing.append(sharing)
            sharing.joined(0.0)
        for number in range(len(self._cores)):
            self._send(0, number)

    def handle_fact(self, fact: facts.Fact) -> list[Action]:
        """Give a fact about a request to the router that has the request, and facts about workers
        and time to all routers.
        """
        if not isinstance(fact, OF_A_REQUEST):
            return [action for n in range(len(self._cores)) for action in self._take_fact(n, fact)]
        if isinstance(fact, facts.Arrival):  # clients or their load balancer choose any router
            self._owners[fact.request_id] = self._random.randrange(len(self._cores))
        number = self._owners[fact.request_id]
        if isinstance(fact, facts.Finish):
            del self._owners[fact.request_id]
        return self._take_fact(number, fact)

    # --- what they say to each other --------------------------------------------------------

    def _take_fact(self, number: int, fact: facts.Fact) -> list[Action]:
        actions = take(self._cores[number], fact)
        if self._sharing and not self._is_send_due[number]:
            self._is_send_due[number] = True
            due_ns = self._agenda.now_ns + self._lag_ns
            self._agenda.at(due_ns, Rank.ANSWER, self._send, number)
        return actions

    def _send(self, now_ns: int, number: int) -> None:
        self._is_send_due[number] = False
        now_s, sender = now_ns / 1e9, self._sharing[number]
        while (payload := sender.outgoing(now_s)) is not None:
            for peer in self._sharing:
                if peer is not sender:
                    peer.incoming(sender.identity, payload, now_s)

    def _take_peer_fact(self, number: int, fact: facts.PeerFact) -> None:
        actions = take(self._cores[number], fact)
        if actions:
            self.carry_out(self._agenda.now_ns, actions)

    # --- what is asked of a core ------------------------------------------------------------

    @property
    def inflight_requests(self) -> int:
        """The number of accepted, unfinished requests of all routers."""
        return sum(core.inflight_requests for core in self._cores)

    @property
    def retries(self) -> int:
        """The number of retries of all routers."""
        return sum(core.counters.retries for core in self._cores)

    @property
    def holds(self) -> int:
        """The number of times that all routers held a request."""
        return sum(core.counters.holds for core in self._cores)
