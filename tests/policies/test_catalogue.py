"""Tests of every policy by name: the catalogue describes it as it is, and it can serve a
wide pool.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from policies import POLICIES
from policies.load import load, text_of
from policies.pick import HOLD, pick
from tests.policies.fleet import fleet_of, request_of
from tests.policies.views import state_after_dispatches
from tests.policies.wide import wide_fleet

CATALOGUE = Path(__file__).parents[2] / "docs" / "catalogue.md"
every_policy = pytest.mark.parametrize("name", list(POLICIES))
ENTRY = re.compile(r"\| `(\w+)` \| [^|\s][^|]* \| [^|\s][^|]* \| (none|`[^|]+) \|")


def entries_of(text: str) -> dict[str, str]:
    """Return the parameters in each policy's row, as written ("": none); a row has a source and a
    cost, too.
    """
    entries: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            entry = ENTRY.fullmatch(line)
            assert entry, f"not a name, a source, a cost and parameters: {line}"
            assert entry[1] not in entries, f"{entry[1]} stands in the catalogue twice"
            entries[entry[1]] = "" if entry[2] == "none" else entry[2]
    return entries


def test_the_catalogue_lists_every_policy_with_its_defaults():
    entries = entries_of(CATALOGUE.read_text(encoding="utf-8"))
    wrong = []
    for name in POLICIES:
        if name not in entries:
            wrong.append(f"{name} is not in {CATALOGUE.name}")
            continue
        written = dict(re.findall(r"`(\w+)=([^`]*)`", entries[name]))
        real = {key: text_of(value) for key, value in load(name).params.items()}
        if written != real:
            wrong.append(f"{name} has the parameters {real}, the catalogue says {written}")
    wrong += [f"{name} is no policy" for name in entries.keys() - POLICIES.keys()]
    assert not wrong, "\n".join(wrong)


def test_catalogue_entries_are_parsed_and_faulty_ones_are_rejected():
    text = "| `a` | ours | x [y] | `b=1`, `c=none` |\n| `d` | a classic | 0 | none |\n"
    assert entries_of(text) == {"a": "`b=1`, `c=none`", "d": ""}
    for faulty in (
        "| `a` | 0 | none |",
        "| `a` |  | 0 | none |",
        "| `a` | ours |  | `b=1` |",
        "| `a` | ours | 0 |  |",
        text + text,
    ):
        with pytest.raises(AssertionError):
            entries_of(faulty)


@every_policy
@pytest.mark.parametrize("workers", [64, 1_000])
@pytest.mark.parametrize("session", [None, "a", "never heard of"])
def test_every_policy_serves_a_wide_pool(name, workers, session):
    policy = load(name)
    for seed in range(4):
        fleet = wide_fleet(seed, workers)
        request = request_of(session=session, serial=seed, draw=seed / 5)
        costs = policy.costs(request, fleet, state_after_dispatches(policy, fleet, seed))
        assert not np.isnan(costs).any()
        assert HOLD < pick(costs, request.draw) < workers


@every_policy
def test_every_policy_serves_a_prompt_without_a_full_block(name):
    policy = load(name)
    fleet = wide_fleet(0, 8)
    for prompt_tokens in (1, 3):
        request = request_of(prompt_tokens=prompt_tokens)
        assert (
            HOLD
            < pick(policy.costs(request, fleet, state_after_dispatches(policy, fleet)), 0.5)
            < 8
        )


@every_policy
def test_each_of_several_equal_workers_is_chosen_sometimes(name):
    """If nothing distinguishes two workers, each of them is chosen sometimes."""
    policy = load(name)
    fleet = fleet_of(worker_id=range(4), kv_used_tokens=0.0, kv_capacity_tokens=1e5)
    state = policy.initial_state()
    chosen = set()
    for serial in range(300):
        chain = np.arange(62, dtype=np.uint64) + np.uint64(1_000 * (serial + 1))
        draw = (serial * 0.618034) % 1.0
        request = request_of(chain=chain, draw=draw, serial=serial, now_s=float(serial))
        chosen.add(pick(policy.costs(request, fleet, state), draw))
    assert chosen == {0, 1, 2, 3}
