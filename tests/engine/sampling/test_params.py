"""Tests of a request's sampling parameters, and of the errors for values that are not allowed."""

from __future__ import annotations

import pytest

from engine.sampling.params import InvalidParam, SamplingParams, choice_seed, mix

BAD = [
    ("temperature", -0.1),
    ("temperature", 101.0),
    ("temperature", float("nan")),
    ("temperature", True),
    ("temperature", "1"),
    ("top_k", -2),
    ("top_k", 2**31),
    ("top_k", 1.5),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", float("inf")),
    ("presence_penalty", 2.01),
    ("frequency_penalty", -2.01),
    ("seed", 2**64),
    ("seed", 1.0),
    ("logprobs", -1),
    ("logprobs", 21),
    ("n", 0),
    ("n", 65),
    ("min_tokens", -1),
    ("stop", "word"),
    ("stop", ("",)),
    ("stop", ("x" * 1025,)),
    ("stop", ("x",) * 17),
    ("stop", (1,)),
    ("stop_token_ids", frozenset({-1})),
    ("stop_token_ids", frozenset(range(257))),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_the_error_names_the_value_out_of_range(field, value):
    with pytest.raises(InvalidParam) as refused:
        SamplingParams(**{field: value})
    assert refused.value.field == field
    assert str(refused.value).startswith(field)


def test_the_limits_of_each_range_are_accepted():
    SamplingParams(0.0, -1, 1e-9, 0.0, 1e-6, -2.0, -2.0, -(2**63), (), logprobs=0)
    SamplingParams(100.0, 2**31 - 1, 1.0, 1.0, 100.0, 2.0, 2.0, 2**64 - 1, logprobs=20, n=64)


def test_values_beyond_the_requests_or_models_limits_are_refused():
    with pytest.raises(InvalidParam, match=r"min_tokens must be at most max_tokens \(4\), got 5"):
        SamplingParams(min_tokens=5).check_against(4, 100)
    with pytest.raises(InvalidParam, match=r"stop_token_ids must be an integer 0\.\.99, got 100"):
        SamplingParams(stop_token_ids=frozenset({100})).check_against(4, 100)
    SamplingParams(min_tokens=4, stop_token_ids=frozenset({99})).check_against(4, 100)


def test_end_of_text_ends_an_answer_unless_ignore_eos_is_set():
    asked = frozenset({7})
    assert SamplingParams(stop_token_ids=asked).stop_tokens([1, 2]) == {1, 2, 7}
    assert SamplingParams(stop_token_ids=asked, ignore_eos=True).stop_tokens([1, 2]) == {7}


def test_choices_have_different_seeds_and_the_first_equals_a_single_choice():
    one, *_ = SamplingParams(seed=11).choices(drawn_seed=5)
    many = SamplingParams(seed=11, n=64).choices(drawn_seed=5)
    assert many[0] == one
    assert one.seed == 11
    assert all(choice.n == 1 for choice in many)
    assert len({choice.seed for choice in many}) == 64
    drawn = SamplingParams(n=2).choices(drawn_seed=5)
    assert [choice.seed for choice in drawn] == [5, choice_seed(5, 1)]
    assert SamplingParams(seed=-1).choices(0)[0].seed == 2**64 - 1


def test_the_seed_mixer_equals_splitmix64():
    """The function that derives seeds gives the first outputs that the reference implementation of
    splitmix64 prints for the seed 1234567.
    """
    golden = 0x9E3779B97F4A7C15
    got = [mix((1234567 + at * golden) % 2**64) for at in (1, 2, 3)]
    assert got == [6457827717110365317, 3203168211198807973, 9817491932198370423]
