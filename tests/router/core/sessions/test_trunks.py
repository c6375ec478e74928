"""Tests of shared prefixes ("trunks"): those with the most traffic are kept, with as many copies as
their demand needs.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels import PrefixOwners, Trunk, Trunks
from router.core.sessions.pool_pace import PoolPace
from tests.effort import examples
from tests.oracles import trunks as trunks_twin
from tests.oracles.trunks import TRUNKS_MAX

BLOCK = 16
FADE_S = 10.0
PACE = PoolPace(workers=32, prefill_tokens_per_s=15_000.0)


def run(start: int, tokens: int) -> np.ndarray:
    return np.arange(start, start + tokens // BLOCK, dtype=np.uint64)


class Traffic:
    """Prompts of new sessions: each has one of some shared beginnings, then tokens that no other
    has.
    """

    def __init__(self, pace: PoolPace = PACE, heads: int = TRUNKS_MAX) -> None:
        self.trunks = Trunks(heads)
        self.pace = pace
        self.trunks.pool(*pace, 0.0)
        self.owners = PrefixOwners(1 << 18)
        self.sessions = 0

    def send(self, *heads: np.ndarray, own_tokens: int = 704, now_s: float = 0.0) -> np.ndarray:
        self.sessions += 1
        own = run((1 << 40) + self.sessions * 10_000, own_tokens)
        chain = np.concatenate([*heads, own])
        known = self.owners.owner(chain)[1]
        shared = self.owners.claim(chain, self.sessions)
        self.trunks.arrival(chain, BLOCK, len(chain) * BLOCK, shared, known, now_s)
        return chain

    def trunk(self, chain: np.ndarray, now_s: float = 0.0) -> Trunk:
        self.trunks.pool(*self.pace, now_s)
        found = self.trunks.of(chain)
        assert found is not None
        return found


def test_two_prompts_with_a_common_prefix_make_a_trunk() -> None:
    traffic, head = Traffic(), run(0, 6_000)
    first = traffic.send(head)
    assert traffic.trunks.of(first) is None
    second = traffic.send(head)
    trunk = traffic.trunk(second)
    assert (trunk.tokens, trunk.last_hash) == (6_000, int(head[-1]))
    assert trunk.wanted_copies == 1
    assert traffic.trunks.of(run(500_000, 6_000)) is None
    assert traffic.trunks.of(run(500_000, 0)) is None


def test_a_steady_demand_wants_as_many_copies_as_can_serve_it() -> None:
    """A steady demand needs as many copies of a shared prefix as can serve it: 20 requests a second
    of 3,000 own tokens need 4 workers' time, or 5 workers at 80 % each.
    """
    traffic, head = Traffic(), run(0, 6_000)
    for i in range(1_200):
        chain = traffic.send(head, own_tokens=3_008, now_s=i / 20)
    trunk = traffic.trunk(chain, 60.0)
    assert trunk.rate_per_s == pytest.approx(20, rel=0.05)
    assert trunk.demand == pytest.approx(20 * 3_008 / 15_000, rel=0.05)
    assert trunk.wanted_copies == math.ceil(trunk.demand / 0.8) == 5
    assert trunk.share == pytest.approx(1.0, abs=0.01)
    assert trunk.backlog_s == 0.0
    for later_s, copies in ((65.0, 4), (75.0, 2), (600.0, 1), (100_000.0, 1)):
        assert traffic.trunk(chain, later_s).wanted_copies <= copies


def test_a_burst_wants_copies_while_each_saves_more_time_than_it_costs() -> None:
    """A burst gets copies of its prefix as long as a copy saves more waiting than computing it
    takes: of 64 requests at once with 3 s of work, a 15th copy saves 0.43 s, a 16th only 0.38 s.
    """
    traffic, head = Traffic(), run(0, 6_000)
    for _ in range(64):
        chain = traffic.send(head)
    trunk = traffic.trunk(chain)
    work_s = 63 * 704 / 15_000  # the first one came before there was a trunk
    assert trunk.backlog_s == pytest.approx(work_s)
    saved_s = [63 * work_s / 2 / (r * (r + 1)) for r in range(1, 64)]  # by the copy after r
    assert trunk.wanted_copies == 1 + sum(each > 6_000 / 15_000 for each in saved_s) == 15
    assert traffic.trunk(chain, 0.1).backlog_s == pytest.approx(work_s - 15 * 0.1)
    assert traffic.trunk(chain, 1.0).wanted_copies == 1


def test_a_global_prefix_and_prefixes_of_tenants_are_nested_trunks() -> None:
    traffic, world = Traffic(), run(0, 2_048)
    tenants = [run(10_000 * i, 4_096) for i in range(1, 5)]
    for i in range(400):
        tenant = tenants[0] if i % 2 else tenants[i // 2 % 4]
        chain = traffic.send(world, tenant, own_tokens=7_504, now_s=i / 20)
    rows = traffic.trunks.table()
    assert rows[0].tokens == 2_048
    assert rows[0].share == pytest.approx(1.0, abs=0.02)
    assert rows[1].last_hash == int(tenants[0][-1])
    assert rows[1].share == pytest.approx(5 / 8, abs=0.05)
    assert len(rows) == 5
    # A light tenant's prompt begins with what all want copies of; its own head asks for none.
    light = traffic.trunk(chain, 20.0)
    assert light.last_hash in {int(world[-1]), *(int(each[-1]) for each in tenants)}
    assert light.wanted_copies > 1


def test_copies_are_bounded_by_pool_size_memory_and_use() -> None:
    def wanted(pace: PoolPace, count: int = 400, own_tokens: int = 704) -> int:
        traffic, head = Traffic(pace), run(0, 6_000)
        for _ in range(count):
            chain = traffic.send(head, own_tokens=own_tokens)
        return traffic.trunk(chain).wanted_copies

    assert wanted(PoolPace(8, 15_000.0)) == 8
    assert wanted(PoolPace(64, 15_000.0)) == 64
    assert wanted(PoolPace(512, 15_000.0)) == 97
    assert wanted(PoolPace(64, 15_000.0, capacity_tokens=300_000.0)) == 10
    assert wanted(PoolPace(64, 15_000.0, capacity_tokens=1_000.0)) == 1
    assert wanted(PoolPace(64, 15_000.0), count=3, own_tokens=60_000) == 2
    assert wanted(PoolPace(8, 15_000.0, answer_s=1.0), count=6) == 5


def test_prefixes_shorter_than_256_tokens_are_no_trunks() -> None:
    traffic = Traffic()
    for _ in range(10):
        traffic.send(run(0, 240))
    assert not len(traffic.trunks)
    traffic.send(run(0, 256))
    traffic.send(run(0, 256))
    assert len(traffic.trunks) == 1


def test_unshared_prompts_and_pairs_do_not_evict_busy_trunks() -> None:
    """Prompts that share nothing, and prompts that come in pairs, do not push two busy shared
    prefixes out of the table.
    """
    traffic, heads = Traffic(), (run(0, 6_000), run(1_000, 3_008))
    for i in range(500):
        traffic.send(run(10**7 + i * 1_000, 512))
    assert not len(traffic.trunks)
    for i in range(4_000):
        now_s = i / 200
        if i % 20 == 0:  # one in twenty is of a real trunk
            chains = [traffic.send(head, now_s=now_s) for head in heads]
        pair = run(10**9 + i // 2 * 1_000, 512)
        traffic.send(pair, now_s=now_s)
    assert len(traffic.trunks) == TRUNKS_MAX
    assert traffic.trunks.replaced > 1_000
    kept = {row.last_hash: row for row in traffic.trunks.table()}
    for head, chain in zip(heads, chains, strict=True):
        assert kept[int(head[-1])].rate_per_s == pytest.approx(10 * (1 - math.exp(-2)), rel=0.1)
        assert traffic.trunk(chain, 20.0).tokens == len(head) * BLOCK


@given(
    heads=st.integers(1, 12),
    arrivals=st.lists(st.tuples(st.integers(0, 30), st.floats(0.0, 40.0)), max_size=120),
    rest_s=st.floats(0.0, 2_000.0),
)
@settings(max_examples=examples(80), deadline=None)
def test_counts_have_at_most_the_error_of_space_saving(
    heads: int, arrivals: list[tuple[int, float]], rest_s: float
) -> None:
    """The counts of shared prefixes have at most the error of Space-Saving: no row exceeds the
    prefix's own decayed count, and no prefix is missing whose count is greater than 1 / heads of
    all counts.
    """
    trunks, now_s, last_s = Trunks(heads), 0.0, {}
    exact: Counter[int] = Counter()
    for which, gap_s in arrivals:
        now_s += gap_s
        chain = run(which * 1_000, 512)
        trunks.arrival(chain, BLOCK, 600, len(chain), len(chain), now_s)
        for head in exact:
            exact[head] *= math.exp(-gap_s / FADE_S)  # type: ignore[assignment]
        exact[which] += 1
        last_s[which] = now_s
    fade = math.exp(-rest_s / FADE_S)
    now_s += rest_s
    total = sum(exact.values())
    trunks.pool(*PACE, now_s)
    rows = {row.last_hash // 1_000: row for row in trunks.table()}
    assert len(rows) <= heads
    for head, row in rows.items():
        true = exact[head] * fade / FADE_S
        assert row.rate_per_s <= true * (1 + 1e-6) + 1e-9
        assert row.rate_per_s >= true - total * fade / heads / FADE_S - 1e-9
        assert 0.0 <= row.share <= 1.0
        assert row.wanted_copies >= 1
    for head, count in exact.items():
        if count > total / heads * (1 + 1e-9):
            assert head in rows


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Draw arrivals of prompts that share beginnings of several lengths, at several rates."""
    events: list[tuple[Any, ...]] = []
    now_s = 0.0
    for _ in range(draw(st.integers(0, 60))):
        now_s += draw(st.sampled_from((0.0, 0.01, 0.7, 12.0, 700.0)))
        if draw(st.integers(0, 5)) == 0:
            pace = (draw(st.integers(0, 64)), *(draw(st.floats(1.0, 1e5)) for _ in range(1)))
            answer_s = draw(st.floats(0.0, 2.0))
            room = draw(st.sampled_from((math.inf, 1e4, 1e6)))
            events.append(("pool", *pace, answer_s, room, now_s))
        size = draw(st.sampled_from((16, 64)))
        path = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
        chain = np.array(
            [hash_ for depth in range(len(path)) for hash_ in range_of(tuple(path[: depth + 1]))],
            dtype=np.uint64,
        )
        shared = draw(st.integers(0, len(chain)))
        known = draw(st.integers(0, len(chain)))
        tokens = len(chain) * size + draw(st.integers(-size, size))
        events.append(("arrival", chain, size, tokens, shared, known, now_s))
        events.append(("of", chain))
    return events


def range_of(path: tuple[int, ...]) -> range:
    start = 1 + sum((step + 1) * 1_000 * 4**depth for depth, step in enumerate(path))
    return range(start, start + 20)


def fields_of(trunk: Any) -> tuple[Any, ...] | None:
    names = ("last_hash", "tokens", "rate_per_s", "share", "demand", "backlog_s", "wanted_copies")
    return None if trunk is None else tuple(getattr(trunk, name) for name in names)


@given(heads=st.integers(1, 6), events=histories())
@settings(max_examples=examples(200), deadline=None)
def test_native_and_python_trunks_are_equal_to_the_last_bit(
    heads: int, events: list[tuple[Any, ...]]
) -> None:
    native, twin = Trunks(heads), trunks_twin.Trunks(heads)
    for name, *arguments in events:
        ours, theirs = getattr(native, name)(*arguments), getattr(twin, name)(*arguments)
        if name == "of":
            assert fields_of(ours) == fields_of(theirs)
    assert [fields_of(row) for row in native.table()] == [fields_of(row) for row in twin.table()]
    assert (len(native), native.replaced) == (len(twin), twin.replaced)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((run(0, 64), 0, 64, 0, 0, 0.0), "block_size"),
        ((run(0, 64), 16, 64, 5, 0, 0.0), "shared_blocks"),
        ((run(0, 64), 16, 64, 0, -1, 0.0), "known_blocks"),
        ((np.zeros(4), 16, 64, 0, 0, 0.0), "chain"),
    ],
)
def test_the_error_names_the_invalid_argument(arguments: tuple[Any, ...], why: str) -> None:
    with pytest.raises((TypeError, ValueError), match=why):
        Trunks().arrival(*arguments)
    with pytest.raises(ValueError, match="heads"):
        Trunks(0)
