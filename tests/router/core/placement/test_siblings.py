"""Tests of sub-agents of one parent, whose prompts begin alike: they go where that beginning is
cached.

Their first prompts have 92 % in common with one another and nothing with their parent's, as in
recorded sessions of coding agents. The default policy decides.
"""

from __future__ import annotations

import pytest

from policies.facts import Finish, FirstToken, Identity
from router.core.contract.actions import Dispatch
from tests.router.core.core_world import World, stored

WORKERS = 3
COMMON = list(range(1, 2_301))  # blocks of 4 tokens
OWN = 200
MAIN = list(range(100_000, 105_000))
GROUP = "person"


class Agents:
    """A main agent and sub-agents of one user, and a pool of idle workers. Lifetime: test."""

    def __init__(self) -> None:
        self.world = World(workers=0, policy="warmset")
        for worker_id in range(WORKERS):
            self.world.join(worker_id, kv_capacity_tokens=150_000.0, prefill_tokens_per_s=20_000.0)
        self._seq = [0] * WORKERS
        self.at_main = self.ask(MAIN, GROUP, Identity(group=GROUP))

    def ask(self, blocks: list[int], session: str, identity: Identity, **fields: object) -> int:
        """Send an agent's request, which then decodes a long answer; return its worker."""
        worker_id = self.queue(blocks, session, identity, **fields)
        self.world.core.on_first_token(FirstToken(self.world.now_s, self.world.next_id - 1))
        self.world.events(worker_id, self._seq[worker_id], stored(blocks))
        self._seq[worker_id] += 1
        self.world.now_s += 1.0
        return worker_id

    def queue(self, blocks: list[int], session: str, identity: Identity, **fields: object) -> int:
        """Send an agent's request whose prompt is not computed yet; return its worker."""
        known = {"session": session, "identity": identity} | fields
        (action,) = self.world.core.on_arrival(self.world.arrival(blocks, **known))
        assert isinstance(action, Dispatch)
        return action.worker_id

    def sibling(self, number: int, **fields: object) -> int:
        own = list(range(number * 1_000_000, number * 1_000_000 + OWN))
        identity = Identity(group=GROUP, parent=GROUP)
        return self.ask(COMMON + own, f"{GROUP}/{number}", identity, **fields)

    def load(self, worker_id: int, requests: int) -> None:
        """Put `requests` requests with unrelated prompts into the queue of a worker."""
        for number in range(requests):
            begins = (number + 1) * 10_000_000
            blocks = list(range(begins, begins + 2_500))
            self.queue(blocks, f"stranger {number}", Identity(), only=worker_id)


@pytest.mark.parametrize("ended", [True, False])
def test_a_sibling_is_sent_to_the_worker_of_the_first_sibling(ended: bool) -> None:
    agents = Agents()
    first = agents.sibling(1)
    assert first != agents.at_main
    if ended:
        request_id = agents.world.next_id - 1
        agents.world.core.on_finish(Finish(agents.world.now_s, request_id, output_tokens=50))
    assert agents.sibling(2) == first


def test_a_sibling_is_sent_to_another_worker_if_that_one_is_overloaded() -> None:
    agents = Agents()
    first = agents.sibling(1)
    agents.load(first, requests=4)
    second = agents.sibling(2)
    assert second != first
    assert agents.sibling(3) == second
