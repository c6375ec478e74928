"""Tests of random histories of a publisher behind a lossy connection: a state that counts as known
is the true one.
"""

from __future__ import annotations

from collections import deque

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from policies.facts import Cleared, KvEvents, ReplayEnd
from router.core.contract.actions import Resync
from tests.effort import examples
from tests.router.core.core_world import World, removed, stored

BUFFER = 6  # batches a publisher can replay


class Line:
    """A publisher that may restart, a connection that loses, repeats and delays batches, and a feed
    with one replay request at a time. Lifetime: example.
    """

    def __init__(self) -> None:
        self.world = World(workers=1, backlog_batches=8)
        self.life = 0
        self.applied_life = 0
        self.held: set[int] = set()
        self.batches: list[tuple] = []
        self.on_the_way: deque[tuple[int, int, tuple]] = deque()  # life, number, events
        self.replay: deque[tuple[int, int, tuple]] | None = None
        self.wanted: int | None = 0

    # --- the publisher ----------------------------------------------------------------------

    def publish(self, block: int, kind: str, lost: bool) -> None:
        if kind == "clear":
            events: tuple = (Cleared(),)
            self.held.clear()
        elif block in self.held:
            events = (removed([block]),)
            self.held.discard(block)
        else:
            events = (stored([block]),)
            self.held.add(block)
        self.batches.append(events)
        if not lost:
            self.on_the_way.append((self.life, len(self.batches) - 1, events))

    def restart(self) -> None:
        self.life += 1
        self.held.clear()
        self.batches.clear()

    # --- the feed ---------------------------------------------------------------------------

    def tell(self, life: int, seq: int, events: tuple, source: str) -> None:
        kv = self.world.core.workers.get(0).kv
        # Numbers of a new life that go on by chance exactly where those of the old one ended, with
        # all between lost, show nothing: such a restart is for the health probes to notice.
        assume(life == self.applied_life or seq != kv.next_seq or seq == 0)
        digest = 1 + life * 100_000 + seq
        fact = KvEvents(0.0, 0, seq, events, source, digest)  # type: ignore[arg-type]
        self.handle(self.world.core.on_kv_events(fact))
        if kv.next_seq == seq + 1:
            self.applied_life = life

    def handle(self, actions: list) -> None:
        for action in actions:
            assert isinstance(action, Resync)
            if self.wanted is None:
                self.wanted = action.from_seq

    def deliver(self, repeated: bool) -> None:
        if self.on_the_way:
            one = self.on_the_way.popleft()
            for _ in range(1 + repeated):
                self.tell(*one, "live")

    def step_replay(self) -> None:
        """Request a replay, or read one batch of the answer, or its end."""
        if self.replay is None:
            if self.wanted is not None:
                first = max(self.wanted, len(self.batches) - BUFFER)
                self.wanted = None
                kept = list(enumerate(self.batches))[first:]
                self.replay = deque((self.life, seq, events) for seq, events in kept)
        elif self.replay:
            self.tell(*self.replay.popleft(), "replay")
        else:
            self.replay = None
            if self.wanted is None:
                self.handle(self.world.core.on_replay_end(ReplayEnd(0.0, 0, answered=True)))

    def settle(self) -> None:
        """Deliver all batches and answer every replay request."""
        for _ in range(1000):
            if not self.on_the_way and self.replay is None and self.wanted is None:
                return
            self.deliver(False)
            self.step_replay()
        raise AssertionError("it asks without end")


STEPS = st.lists(
    st.one_of(
        *[st.tuples(st.just("publish"), st.integers(0, 7), st.just(""), st.booleans())] * 4,
        st.tuples(st.just("publish"), st.just(0), st.just("clear"), st.booleans()),
        *[st.tuples(st.just("deliver"), st.booleans())] * 4,
        *[st.tuples(st.just("step_replay"))] * 3,
        st.tuples(st.just("restart")),
        st.tuples(st.just("settle")),
    ),
    max_size=60,
)


@settings(max_examples=examples(400), deadline=None)
@given(steps=STEPS)
def test_a_known_state_equals_the_blocks_that_the_worker_holds(steps: list) -> None:
    line = Line()
    for name, *what in steps:
        getattr(line, name)(*what)
    line.settle()
    line.publish(7, "", lost=False)  # a batch that arrives shows what is missing before it
    line.publish(6, "", lost=False)
    line.settle()
    kv = line.world.core.workers.get(0).kv
    seen = {block for block in range(8) if line.world.hits([block]) == [1]}
    assert seen <= line.held
    if kv.known:
        assert seen == line.held
    if len(line.batches) <= BUFFER:  # nothing can be missing of a stream that can be replayed
        assert kv.known
