"""A test world of several decision cores with the same workers, and a bus between them that may
lose, delay or repeat messages.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from policies.facts import Arrival, Failure, Finish, FirstToken, Progress, Tick
from router.core.contract.actions import Dispatch
from router.core.core import take
from router.replicas.messages import decoded
from router.replicas.sharing import Sharing
from tests.router.core.core_world import World


@dataclass
class Replica:
    """One decision core with its side of the exchange between replicas. Lifetime: test."""

    name: str
    world: World
    sharing: Sharing = field(init=False)
    inbox: dict[str, deque[bytes]] = field(default_factory=dict)
    open: dict[int, bool] = field(default_factory=dict)  # ours at a worker: whether it has begun

    def __post_init__(self) -> None:
        core = self.world.core
        self.sharing = Sharing(self.name, core, lambda fact: self.done(take(core, fact)))

    def done(self, actions: list) -> None:
        for action in actions:
            if isinstance(action, Dispatch):
                self.open[action.request_id] = False
            elif hasattr(action, "status"):
                self.open.pop(action.request_id, None)

    def arrive(self, blocks: list[int], **fields: object) -> Arrival:
        arrival = self.world.arrival(blocks, **fields)
        self.done(self.world.core.on_arrival(arrival))
        return arrival

    def begin(self, request_id: int, output_tokens: int) -> None:
        core, now_s = self.world.core, self.world.now_s
        self.open[request_id] = True
        self.done(core.on_first_token(FirstToken(now_s, request_id)))
        self.done(core.on_progress(Progress(now_s, request_id, output_tokens)))

    def end(self, request_id: int, how: str) -> None:
        core, now_s = self.world.core, self.world.now_s
        self.open.pop(request_id)
        if how == "finish":
            self.done(core.on_finish(Finish(now_s, request_id, 8, 4, 100)))
        else:
            self.done(core.on_failure(Failure(now_s, request_id, "worker", how == "retry", how)))


class Replicas:
    """All replicas of the world, on one clock. Lifetime: test."""

    def __init__(self, count: int, workers: int = 3, policy: str = "least_requests") -> None:
        self.now_s = 0.0
        self._workers, self._policy, self._born = workers, policy, 0
        self.replicas: dict[str, Replica] = {}
        for _ in range(count):
            self.start()

    def start(self) -> Replica:
        self._born += 1
        world = World(self._workers, self._policy, hold_requests=4, ejection_failures=1000)
        replica = Replica(f"r@{self._born}", world)
        self.replicas[replica.name] = replica
        replica.world.now_s = self.now_s
        replica.sharing.joined(self.now_s)
        return replica

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        for replica in self.replicas.values():
            replica.world.now_s = self.now_s
            replica.done(replica.world.core.on_tick(Tick(self.now_s)))

    def flush(self, replica: Replica, lose: bool = False) -> None:
        """Deliver the replica's outgoing messages to all connected peers' inboxes; with `lose`,
        drop them.
        """
        while (payload := replica.sharing.outgoing(self.now_s)) is not None:
            decoded(payload)
            for other in self.replicas.values():
                if other is not replica and not lose and other.sharing.connected:
                    other.inbox.setdefault(replica.name, deque()).append(payload)

    def deliver(self, replica: Replica, most: int = 1_000_000) -> None:
        for peer, queue in list(replica.inbox.items()):
            while queue and most > 0:
                replica.sharing.incoming(peer, queue.popleft(), self.now_s)
                most -= 1

    def cut_link(self, replica: Replica) -> None:
        replica.inbox.clear()
        replica.sharing.parted(self.now_s)

    def kill(self, replica: Replica) -> None:
        del self.replicas[replica.name]

    def settle(self) -> None:
        """Connect all replicas and deliver all messages, for longer than any wait of the
        protocol.
        """
        for replica in self.replicas.values():
            if not replica.sharing.connected:
                replica.sharing.joined(self.now_s)
        for _ in range(20):
            self.advance(0.1)
            for replica in self.replicas.values():
                replica.sharing.present(set(self.replicas), self.now_s)
                self.flush(replica)
            for replica in self.replicas.values():
                self.deliver(replica)
