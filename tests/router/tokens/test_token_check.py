"""Tests of when a model's token ids are trusted, by counts of its traffic, probes of its workers,
and time.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from engine.wire.memo import PieceMemo
from router.collectors.ports_and_logs import token_metrics
from router.metrics.exposition import Families
from router.tokens.check import MAX_MODELS, TokenCheck
from tests.router.property_support import patient

RECHECK_S = 300.0


class World:
    """The check of a model's token ids, and its clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.check = TokenCheck(lambda: self.now_s, lambda: RECHECK_S)

    def differ(self, times: int) -> None:
        for _ in range(times):
            self.check.counted("m", 10, 11)

    def agree(self, times: int) -> None:
        for _ in range(times):
            self.check.counted("m", 10, 10)

    @property
    def trusted(self) -> bool:
        return self.check.trusts("m")


def test_several_differing_counts_suspend_a_model_and_one_does_not() -> None:
    world = World()
    assert world.trusted
    world.differ(2)
    assert world.trusted
    world.differ(1)
    assert not world.trusted
    assert world.check.trusts("n")
    assert world.check.mismatches["m"] == 3
    assert dict(world.check.exact()) == {"m": False}


def test_a_few_differing_prompts_among_many_do_not_suspend_a_model() -> None:
    world = World()
    for _ in range(100):
        world.differ(1)
        world.agree(11)
        assert world.trusted
    for _ in range(100):
        world.differ(1)
        world.agree(4)
    assert not world.trusted


def test_a_suspended_model_returns_on_probation_after_longer_times() -> None:
    world = World()
    world.differ(3)
    aside_s = RECHECK_S
    for _ in range(6):
        world.differ(5)  # prompts that were under way
        world.now_s += aside_s - 0.1
        assert not world.trusted
        world.now_s += 0.1
        assert world.trusted
        world.differ(1)
        assert not world.trusted
        aside_s = min(2 * aside_s, 3_600.0)
    world.now_s += aside_s
    assert world.trusted
    world.agree(30)
    world.differ(3)
    world.now_s += RECHECK_S  # all is forgotten by then
    assert world.trusted


def test_differing_probes_suspend_a_model_until_they_agree_or_the_worker_leaves() -> None:
    world = World()
    world.check.probed("m", 1, "a chat has 9 tokens by our count, 10 by its own")
    world.check.probed("m", 2, None)
    assert not world.trusted
    world.now_s += 10_000.0
    assert not world.trusted
    world.check.probed("m", 1, None)
    assert world.trusted
    world.check.probed("m", 3, "differs")
    assert not world.trusted
    world.check.forget(3)
    assert world.trusted


def test_agreeing_probes_clear_the_counts_of_traffic() -> None:
    world = World()
    world.differ(3)
    assert not world.trusted
    world.check.probed("m", 1, None)
    assert world.trusted
    world.differ(2)
    assert world.trusted


def test_a_suspension_is_logged_once_with_counts(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    with caplog.at_level(logging.WARNING):
        world.differ(9)
        world.now_s += RECHECK_S
        assert world.trusted
        world.differ(1)
        world.check.probed("m", 1, "a text has 3 tokens by our count, 4 by its own")
    (record,) = caplog.records
    text = record.getMessage()
    assert "10 tokens by our count, 11 by its worker's" in text
    world.check.probed("m", 1, None)
    with caplog.at_level(logging.WARNING):
        world.check.probed("m", 1, "a text has 3 tokens by our count, 4 by its own")
    assert "worker 1: a text has 3 tokens" in caplog.records[-1].getMessage()


def test_the_number_of_checked_models_is_bounded() -> None:
    check = TokenCheck(lambda: 0.0, lambda: 1.0)
    for number in range(MAX_MODELS + 10):
        check.counted(f"m{number}", 1, 2)
        check.probed(f"m{number}", 0, "differs")
    assert len(list(check.exact())) == len(check.mismatches) == MAX_MODELS
    assert check.trusts(f"m{MAX_MODELS}")


steps = st.one_of(
    st.tuples(st.just("count"), st.booleans()),
    st.tuples(st.just("probe"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("forget"), st.integers(0, 2)),
    st.tuples(st.just("wait"), st.floats(0.0, 1_000.0)),
)


@patient
@given(st.lists(steps, max_size=40))
def test_no_history_suspends_a_model_forever(history: list[tuple[Any, ...]]) -> None:
    world = World()
    failing: set[int] = set()
    for step in history:
        match step:
            case "count", same:
                world.check.counted("m", 10, 10 if same else 11)
            case "probe", worker, same:
                world.check.probed("m", worker, None if same else "differs")
                (failing.discard if same else failing.add)(worker)
            case "forget", worker:
                world.check.forget(worker)
                failing.discard(worker)
            case "wait", seconds:
                world.now_s += seconds
        if failing:
            assert not world.trusted
    for worker in failing:
        world.check.forget(worker)
    world.now_s += 3_600.0
    assert world.trusted


def test_token_checks_and_memo_use_are_exposed_as_metrics() -> None:
    world = World()
    world.differ(3)
    world.check.counted("n", 1, 1)
    registry = CollectorRegistry()
    memo = PieceMemo(0)
    memo.encoded_chars, memo.reused_chars, memo.bytes = 5, 7, 9
    registry.register(Families(lambda: token_metrics(world.check, memo)))
    text = generate_latest(registry).decode()
    assert 'warmroute_tokenizer_mismatch_total{model="m"} 3.0' in text
    assert 'warmroute_tokenizer_mismatch_total{model="n"} 0.0' in text
    assert 'warmroute_tokenizer_exact{model="m"} 0.0' in text
    assert 'warmroute_tokenizer_exact{model="n"} 1.0' in text
    assert 'warmroute_tokenized_characters_total{result="encoded"} 5.0' in text
    assert 'warmroute_tokenized_characters_total{result="reused"} 7.0' in text
    assert "warmroute_token_memo_bytes 9.0" in text


def test_the_state_shows_how_far_token_ids_are_checked() -> None:
    world = World()
    check = world.check
    assert check.state("m") == "unchecked"
    check.probed("m", 1, None)
    assert check.state("m") == "checked"
    check.probed_tools("m", 1, "a chat with tools has 9 tokens by our count, 10 by its own")
    assert check.state("m") == "tools"
    check.probed("m", 2, "a text has 9 tokens by our count, 10 by its own")
    assert check.state("m") == "differ"
    check.forget(2)
    check.forget(1)
    assert check.state("m") == "checked"
    world.differ(3)
    assert check.state("m") == "differ"
