"""Tests of the choice of a model name's target: shares, sessions that keep their target, and
targets without workers.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from math import log
from typing import cast

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import WorkerFacts
from router.config.extras import NameSettings
from router.core.workers.table import WorkerTable
from router.names.beginnings import beginning_of
from router.names.metrics import NameMetrics
from router.names.model_names import ModelNames, heaviest
from router.names.rules import NameTarget
from router.record.named import NamedModel

SESSIONS = 10_000


@dataclass
class Worker:
    facts: WorkerFacts
    takes_requests: bool = True


@dataclass
class Workers:
    """The attributes of the table of workers that the rules of names read."""

    rows: list[Worker] = field(default_factory=list)
    version: int = 0

    def add(self, model: str, revision: str | None = None) -> Worker:
        facts = WorkerFacts(f"w{len(self.rows)}", (model,), 16, revision=revision)
        self.rows.append(Worker(facts))
        self.version += 1
        return self.rows[-1]

    asked: int = 0  # how often all workers were looked through for a model

    def serving(self, model: str) -> list[Worker]:
        self.asked += 1
        return [w for w in self.rows if model in w.facts.models]

    def serves(self, model: str) -> bool:
        return any(model in w.facts.models for w in self.rows)

    def models(self) -> list[str]:
        return sorted({model for w in self.rows for model in w.facts.models})


def names(workers: Workers, *aliases: str, targets: tuple[str, ...] = ()) -> ModelNames:
    return ModelNames(
        NameSettings(aliases=aliases, targets=targets), cast("WorkerTable", workers), NameMetrics()
    )


def chosen(
    found: ModelNames, asked: str, session: str | None = "s", body: bytes = b"{}", tenant: str = "t"
) -> NamedModel | None:
    return asyncio.run(found.choose(asked, tenant, session, body))


def all_chosen(found: ModelNames, asked: str) -> list[str]:
    async def choose_all() -> list[str]:
        every = [await found.choose(asked, None, f"s{n}", b"") for n in range(SESSIONS)]
        return [one.target for one in every if one is not None]

    return asyncio.run(choose_all())


def pool(*pairs: tuple[str, str | None]) -> Workers:
    workers = Workers()
    for model, revision in pairs:
        workers.add(model, revision)
    return workers


TWO = pool(("llama", "v1"), ("llama", "v2"))


def test_targets_get_their_shares_of_sessions_and_sessions_keep_theirs() -> None:
    found = names(TWO, targets=("chat=llama@v1:90,llama@v2:10",))
    first = all_chosen(found, "chat")
    assert 900 <= first.count("llama@v2") <= 1_100
    assert all_chosen(found, "chat") == first
    again = names(TWO, targets=("chat=llama@v2:10,llama@v1:90",))  # order is no matter
    assert all_chosen(again, "chat") == first


def test_a_changed_weight_moves_only_its_share_of_sessions() -> None:
    settings = NameSettings(targets=("chat=llama@v1:90,llama@v2:10",))
    found = names(TWO, targets=settings.targets)
    before = all_chosen(found, "chat")
    found.renew(NameSettings(targets=("chat=llama@v1:80,llama@v2:20",)))
    after = all_chosen(found, "chat")
    moved = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert 900 <= len(moved) <= 1_100
    assert set(moved) == {("llama@v1", "llama@v2")}


WEIGHTS = st.lists(st.floats(0.01, 1e6), min_size=2, max_size=6)


@given(WEIGHTS, st.integers(0, 5), st.floats(1.01, 100.0), st.binary(max_size=8))
def test_a_target_with_more_weight_only_gains_sessions(weights, which, factor, whose) -> None:
    which %= len(weights)
    targets = [NameTarget(f"m{n}", None, weight) for n, weight in enumerate(weights)]
    costs = [
        -log((xxhash.xxh3_64_intdigest(t.model.encode(), _seed("r", whose)) + 0.5) / 2**64)
        / t.weight
        for t in targets
    ]
    first = heaviest("r", whose, targets)
    assert first is targets[costs.index(min(costs))]
    gains = NameTarget(f"m{which}", None, weights[which] * factor)
    after = heaviest("r", whose, [*targets[:which], gains, *targets[which + 1 :]])
    assert after in (first, gains)
    without = [one for one in targets if one is not first]
    assert heaviest("r", whose, without) in without  # a session with another target keeps it
    gone = [one for one in targets if one is not targets[which]]
    if first is not targets[which]:
        assert heaviest("r", whose, gone) is first


def _seed(rule: str, whose: bytes) -> int:
    packed = bytes([0x92, 0xA0 + len(rule)]) + rule.encode() + bytes([0xC4, len(whose)]) + whose
    return xxhash.xxh3_64_intdigest(packed)


def test_a_target_without_workers_loses_its_share_until_they_return() -> None:
    workers = pool(("llama", "v1"))
    found = names(workers, targets=("chat=llama@v1:50,llama@v2:50",))
    assert set(all_chosen(found, "chat")) == {"llama@v1"}
    second = workers.add("llama", "v2")
    both = all_chosen(found, "chat")
    assert 4_800 <= both.count("llama@v2") <= 5_200
    second.takes_requests = False
    workers.version += 1
    assert set(all_chosen(found, "chat")) == {"llama@v1"}
    workers.rows.clear()
    workers.version += 1
    assert all_chosen(found, "chat") == both  # nobody: by all weights


def test_a_target_of_weight_0_gets_no_new_sessions() -> None:
    found = names(TWO, targets=("chat=llama@v1:1,llama@v2:0",))
    assert set(all_chosen(found, "chat")) == {"llama@v1"}
    alone = names(pool(("llama", "v2")), targets=("chat=llama@v1:1,llama@v2:0",))
    assert set(all_chosen(alone, "chat")) == {"llama@v1"}


def test_an_alias_of_a_split_name_chooses_the_same_targets() -> None:
    found = names(TWO, "claude-*=chat", "x=chat", targets=("chat=llama@v1:1,llama@v2:1",))
    direct = all_chosen(found, "chat")
    assert all_chosen(found, "claude-3") == direct
    assert all_chosen(found, "x") == direct
    named = chosen(found, "x")
    assert named is not None
    assert (named.asked, named.rule, named.model) == ("x", "chat", "llama")


def test_a_model_may_be_split_by_its_revisions() -> None:
    found = names(TWO, targets=("llama=llama@v1:1,llama@v2:1",))
    assert set(all_chosen(found, "llama")) == {"llama@v1", "llama@v2"}
    named = chosen(found, "llama")
    assert named is not None
    assert not named.renames
    assert found.hidden_models() == []


def test_models_precede_patterns_and_rules_precede_models(caplog) -> None:
    workers = pool(("claude-real", None), ("llama", None))
    found = names(workers, "claude-*=llama")
    assert chosen(found, "claude-real") is None
    assert chosen(found, "claude-x") == NamedModel("claude-x", "claude-*", "llama")
    assert chosen(found, "else") is None
    ruled = names(workers, "claude-real=llama")
    for _ in range(3):
        assert chosen(ruled, "claude-real") == NamedModel("claude-real", "claude-real", "llama")
    assert [r.message for r in caplog.records] == [
        "the name 'claude-real' has a rule, and workers serve a model of that name: the rule counts"
    ]
    assert ruled.hidden_models() == ["claude-real"]


def test_ten_thousand_names_resolve_to_their_models() -> None:
    workers = pool(("llama", None))
    found = names(workers, *(f"n{n}=llama" for n in range(10_000)))
    assert chosen(found, "n9999") == NamedModel("n9999", "n9999", "llama")
    assert len(found.with_cards([{"id": "llama"}])) == 10_001


def test_an_unserved_name_causes_no_scan_of_the_workers() -> None:
    workers = pool(("llama", None))
    found = names(workers, *(f"n{n}=llama" for n in range(50)), "claude-*=llama")
    for asked in ("n1", "claude-x", "n2", "else"):
        chosen(found, asked)
    found.with_cards([{"id": "llama"}])
    assert found.hidden_models() == []
    assert workers.asked == 0
    table = WorkerTable(4)
    assert not table.block_sizes("n1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerTable, "serving", lambda *_: pytest.fail("it looked"))
        assert not table.block_sizes("n2")


def test_cards_are_cached_until_a_worker_or_a_rule_changes() -> None:
    workers = pool(("a", None))
    found = names(workers, targets=("x=a:1,b:2",))
    cards = [{"id": "a", "max_model_len": 9}, {"id": "b"}]
    first = found.with_cards(cards)[-1]
    assert first["root"] == "a"
    assert found.with_cards([dict(card) for card in cards])[-1] is first
    cards = [{"id": "a", "max_model_len": 8}, {"id": "b"}]
    assert found.with_cards(cards)[-1]["max_model_len"] == 8
    workers.add("b")
    assert found.with_cards(cards)[-1]["root"] == "b"
    found.renew(NameSettings(aliases=("y=a", "b=a")))
    assert [card["id"] for card in found.with_cards(cards)] == ["a", "b", "y"]
    assert found.hidden_models() == ["b"]
    workers.rows.clear()
    workers.version += 1
    assert found.hidden_models() == []


def test_a_single_card_equals_the_one_in_the_list() -> None:
    found = names(TWO, "claude-*=llama", "gpt-4o=llama", "lora=ad", "none=nobody")
    cards = {"llama": {"id": "llama", "max_model_len": 9}, "ad": {"id": "ad", "parent": "llama"}}
    for card in found.with_cards([*cards.values()])[2:]:
        assert found.card(card["id"], cards.get) == card
    assert found.card("claude-x", cards.get) is None


def test_each_name_of_a_wide_graph_is_resolved_once() -> None:
    targets = ["z=m:1,n:1"]
    for step in range(6):
        ahead = "z" if step == 0 else f"s{step - 1}-"
        below = [ahead] if step == 0 else [f"{ahead}{n}" for n in range(30)]
        targets += [
            f"s{step}-{n}=" + ",".join(f"{one}:1" for one in [*below, f"x{n}"]) for n in range(30)
        ]
    found = names(Workers(), targets=tuple(targets))
    assert chosen(found, "s5-0") is not None


def test_the_card_of_a_name_describes_its_model() -> None:
    found = names(TWO, "claude-*=llama", "gpt-4o=llama", "lora=ad", "llama=llama@v1")
    cards = [
        {"id": "llama", "parent": None, "max_model_len": 9},
        {"id": "ad", "parent": "llama"},
    ]
    shown = {card["id"]: card for card in found.with_cards(cards)}
    assert list(shown) == ["llama", "ad", "gpt-4o", "lora"]
    assert shown["gpt-4o"] == {
        "id": "gpt-4o",
        "object": "model",
        "created": 0,
        "owned_by": "warmroute",
        "root": "llama",
        "parent": None,
        "max_model_len": 9,
    }
    assert (shown["lora"]["root"], shown["lora"]["parent"]) == ("ad", "llama")


def turns_of(*contents: object, role: str = "user") -> list[dict[str, object]]:
    return [{"role": role, "content": content} for content in contents]


SYSTEM = {"role": "system", "content": "You are brief. " * 400}


@pytest.mark.parametrize("field", ["messages", "input"])
def test_turns_of_one_conversation_have_the_same_beginning(field) -> None:
    first = [SYSTEM, *turns_of("Hello")]
    later = [
        SYSTEM,
        *turns_of([{"type": "text", "text": "Hello", "cache_control": {}}]),
        *turns_of("more"),
    ]
    other = [SYSTEM, *turns_of("Bye")]

    def beginning(messages: object) -> bytes:
        return beginning_of(json.dumps({field: messages, "system": "x"}).encode())

    assert beginning(first) == beginning(later) != beginning(other)
    assert len(beginning(first)) < 20_000


def test_a_request_without_messages_begins_with_its_prompt() -> None:
    text = "é" * 3_000

    def beginning(**fields: object) -> bytes:
        return beginning_of(json.dumps(fields).encode())

    assert (
        beginning(prompt=text + "a")
        == beginning(prompt=text + "b", model="x")
        != beginning(prompt="z")
    )
    assert beginning(prompt=[1, 2]) != beginning(prompt=[1, 3])
    assert beginning(input="a") != beginning(input="b")
    assert beginning(input=["a"]) != beginning(input=["b"])
    assert beginning(messages=[1]) == beginning(messages=[1])
    assert beginning_of(b"") == beginning_of(b"[1]") == beginning_of(b'{"a":1}') == b""


def test_without_a_session_the_conversation_decides_the_target() -> None:
    found = names(TWO, targets=("chat=llama@v1:1,llama@v2:1",))
    bodies = [json.dumps({"prompt": f"{n} {'x' * 40_000 * (n % 2)}"}).encode() for n in range(40)]
    first = [chosen(found, "chat", None, body) for body in bodies]
    assert [chosen(found, "chat", None, body) for body in bodies] == first
    assert {one.revision for one in first if one is not None} == {"v1", "v2"}
    tenants = [chosen(found, "chat", None, bodies[0], tenant=f"t{n}") for n in range(20)]
    assert len(set(tenants)) == 2
