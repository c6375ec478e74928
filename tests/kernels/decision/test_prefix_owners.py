"""Tests of the native table of prefix owners: it agrees with its Python version over random
histories and keeps its promises.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvkernels import PrefixOwners
from tests.effort import examples
from tests.kernels.histories import garbage, hashes, paths
from tests.oracles import prefix_owners as prefix_owners_twin

Either = type[PrefixOwners] | type[prefix_owners_twin.PrefixOwners]
both = pytest.mark.parametrize(
    "kind", [PrefixOwners, prefix_owners_twin.PrefixOwners], ids=["native", "twin"]
)
owners = st.integers(0, 4) | st.just((1 << 61) - 1)


def run(start: int, blocks: int) -> np.ndarray:
    return np.arange(start, start + blocks, dtype=np.uint64)


class NativeAndPythonMachine(RuleBasedStateMachine):
    """Checks that the native table answers as its Python version and never claims more than the
    test claimed.
    """

    @initialize(max_entries=st.integers(1, 80))
    def start(self, max_entries: int) -> None:
        self.pair: tuple[Any, Any] = (
            PrefixOwners(max_entries),
            prefix_owners_twin.PrefixOwners(max_entries),
        )
        self.users: dict[int, set[int]] = {}  # all that was ever claimed

    def same_answer(self, name: str, *arguments: Any) -> Any:
        native, twin = (getattr(each, name)(*arguments) for each in self.pair)
        assert native == twin
        return native

    def exact(self, chain: list[int]) -> int:
        """Return how many leading blocks several owners have claimed, counted one by one."""
        ends = (i for i, each in enumerate(chain) if len(self.users.get(each, ())) < 2)
        return next(ends, len(chain))

    @rule(chain=paths, owner=owners)
    def claim(self, chain: list[int], owner: int) -> None:
        for each in chain:
            self.users.setdefault(each, set()).add(owner)
        told = self.same_answer("claim", hashes(chain), owner)
        assert told <= self.exact(chain)
        if not self.pair[0].evicted:
            assert told == self.exact(chain)

    @rule(chain=paths)
    def ask(self, chain: list[int]) -> None:
        shared = self.same_answer("shared", hashes(chain))
        owner, depth = self.same_answer("owner", hashes(chain))
        known = [each for each in chain if each in self.users]
        assert shared <= min(depth, self.exact(chain))
        assert depth <= len(known)
        if owner >= 0:
            assert owner in self.users[chain[depth - 1]]
        if not self.pair[0].evicted:
            assert (shared, depth) == (self.exact(chain), len(known))
            sole = self.users[known[-1]] if known else set()
            assert owner == (next(iter(sole)) if len(sole) == 1 else -1)

    @invariant()
    def same_state(self) -> None:
        native, twin = self.pair
        assert (len(native), native.evicted) == (len(twin), twin.evicted)
        assert len(native) <= native.max_entries == twin.max_entries
        assert native.memory_bytes == twin.memory_bytes


TestNativeAndPythonMachine = NativeAndPythonMachine.TestCase
TestNativeAndPythonMachine.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)


@given(
    max_entries=st.integers(1, 40),
    claims=st.lists(st.tuples(paths | garbage, owners), max_size=40),
)
@settings(max_examples=examples(60), deadline=None)
def test_native_and_python_answer_invalid_chains_equally(
    max_entries: int, claims: list[tuple[list[int], int]]
) -> None:
    native = PrefixOwners(max_entries)
    twin = prefix_owners_twin.PrefixOwners(max_entries)
    for chain, owner in claims:
        assert native.claim(hashes(chain), owner) == twin.claim(hashes(chain), owner)
        assert native.owner(hashes(chain)) == twin.owner(hashes(chain))
        assert (len(native), native.evicted) == (len(twin), twin.evicted)


@both
def test_the_table_finds_where_prompts_of_owners_diverge(kind: Either) -> None:
    """The table finds where the prompts of different owners part: a prefix of all, one of a tenant
    after it, two sessions of this tenant, and one session of another tenant.
    """
    table: Any = kind(1_000)
    world, tenant = run(0, 10), run(100, 5)
    first = np.concatenate([world, tenant, run(200, 7)])
    second = np.concatenate([world, tenant, run(300, 7)])
    other = np.concatenate([world, run(400, 3)])
    assert table.claim(first, 1) == 0
    assert table.owner(first) == (1, 22)
    assert table.claim(first, 1) == 0
    assert table.claim(second, 2) == 15
    assert table.shared(first) == 15
    assert table.claim(other, 3) == 10
    assert table.shared(second) == 15
    assert table.owner(first) == (1, 22)
    assert table.owner(second[:12]) == (-1, 12)
    longer = np.concatenate([first, run(500, 20)])
    assert table.owner(longer) == (1, 22)
    assert table.claim(longer, 1) == 15
    assert table.owner(run(900, 4)) == (-1, 0)
    assert table.shared(run(900, 4)) == 0
    assert table.claim(first, 9) == 22
    assert table.shared(longer) == 22
    assert table.owner(longer) == (1, 42)
    assert len(table) == 52
    assert not table.evicted


@both
def test_blocks_claimed_again_survive_a_flood_of_prompts_claimed_once(kind: Either) -> None:
    """Blocks that are claimed again outlive a flood of prompts seen once, which is twice as large
    as the table between any two claims.
    """
    table: Any = kind(1_000)
    session, start = run(0, 200), 10_000
    table.claim(session, 1)
    for _ in range(10):
        table.claim(session, 1)
        for flood in range(20):
            table.claim(run(start, 100), 10 + flood)
            start += 100
        assert table.owner(session) == (1, 200)
    assert len(table) == 1_000
    assert table.evicted == start - 10_000 + 200 - 1_000


@both
def test_the_end_of_a_chain_is_evicted_before_its_start(kind: Either) -> None:
    table: Any = kind(100)
    old = run(0, 60)
    table.claim(old, 1)
    for start in range(1_000, 1_200, 10):
        table.claim(run(start, 10), 2)
        owner, depth = table.owner(old)
        held = [table.owner(old[i : i + 1])[1] for i in range(60)]
        assert sum(held) == depth
        assert owner == 1 or not depth
    assert table.owner(old) == (-1, 0)


@both
def test_missing_blocks_are_filled_in_from_the_blocks_after_them(kind: Either) -> None:
    """The missing blocks in the middle of a chain are filled from the blocks behind them: blocks
    0..4 leave a chain that two owners have claimed, and when one owner claims it again, all blocks
    are shared.
    """
    table: Any = kind(40)
    chain = run(0, 20)
    table.claim(chain[:5], 1)  # the oldest of all, and never warmed again
    rest: Any = chain[5:]
    for owner in (1, 2, 1, 2):
        table.claim(rest, owner)
    start = 1_000
    while table.owner(chain[:1])[1]:
        table.claim(run(start, 1), 3)
        start += 1
    assert table.shared(chain) == 0
    assert table.shared(rest) == 15
    assert table.claim(chain, 1) == 20
    assert table.shared(chain) == 20


@both
def test_a_chain_longer_than_the_table_keeps_its_first_blocks(kind: Either) -> None:
    table: Any = kind(50)
    table.claim(run(0, 500), 1)
    assert table.owner(run(0, 500)) == (1, 50)
    assert len(table) == 50
    assert table.evicted == 450


@both
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda kind: kind(0), ValueError, "max_entries must be 1..268435456, got 0"),
        (lambda kind: kind(2**28 + 1), ValueError, "max_entries must be 1..268435456, got 268435"),
        (lambda kind: kind(1.5), TypeError, "max_entries must be an int, got float"),
        (lambda kind: kind(4).claim([1], 0), TypeError, "chain must be a buffer of uint64"),
        (lambda kind: kind(4).claim(run(0, 9)[::2], 0), ValueError, "chain must be C-contiguous"),
        (
            lambda kind: kind(4).claim(run(0, 1), -1),
            ValueError,
            "owner must be 0..23058430092136939",
        ),
        (lambda kind: kind(4).claim(run(0, 1), 2**61), ValueError, "got 2305843009213693952"),
        (lambda kind: kind(4).claim(run(0, 1), "a"), TypeError, "owner must be an int, got str"),
        (lambda kind: kind(4).shared(None), TypeError, "chain must be a buffer of uint64"),
        (lambda kind: kind(4).owner(b"12345678"), TypeError, "chain must be a buffer of uint64"),
    ],
)
def test_invalid_arguments_are_refused(
    kind: Either, call: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words.replace("(", r"\(")):
        call(kind)


def test_threads_share_one_table() -> None:
    table = PrefixOwners(4_096)
    trunk = run(0, 64)
    failures: list[str] = []

    def live(owner: int) -> None:
        for turn in range(1, 60):
            chain = np.concatenate([trunk, run(10_000 * (owner + 1), 8 * turn)])
            shared = table.claim(chain, owner)
            if not 0 <= shared <= 64 or table.shared(chain) > 64:
                failures.append(f"{owner} shares {shared} blocks at turn {turn}")

    threads = [threading.Thread(target=live, args=(owner,)) for owner in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(table) <= 4_096
    assert table.shared(trunk) == 64
