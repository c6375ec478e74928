"""Tests of the sampler against plain numpy: it gives right tokens and frequencies, whatever other
rows are in the batch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.params import SamplingParams
from engine.scheduler.request import Request
from tests.effort import examples
from tests.engine.runner.sampling_oracle import penalized, probabilities

torch = pytest.importorskip("torch", reason="the sampler needs torch: pip install -e '.[engine]'")

from engine.runner.torch_sampler import Sampler, uniform  # noqa: E402 - after the skip

VOCAB = 40
# 0.999 quantiles of chi square by degrees of freedom (NIST/SEMATECH handbook, 1.3.6.7.4).
CHI_SQUARE_999 = {7: 24.322, 9: 27.877, 11: 31.264}

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 1, 3, VOCAB, 10**6]),
    top_p=st.sampled_from([1e-6, 0.4, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-0.5, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([-0.5, 0.0, 0.7]),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([None, 0, 3, 20]),
    min_tokens=st.sampled_from([0, 3]),
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)


def asking(params: SamplingParams | None, prompt: list[int], output: list[int]) -> Request:
    one = Request(
        0, np.array(prompt, dtype=np.int32), 100, stop_tokens=frozenset({2, 5}), sampling=params
    )
    one.output = list(output)
    return one


ROWS = st.lists(st.builds(asking, PARAMS, TOKENS, TOKENS | st.just([])), min_size=1, max_size=7)


def some_logits(rows: int, seed: int, dtype: object = None) -> torch.Tensor:
    """Return random logits that are distinct within each row, so that the order of summing cannot
    decide between equal ones.
    """
    values = np.random.default_rng(seed).normal(0.0, 3.0, (rows, VOCAB))
    return torch.from_numpy(values).to(dtype or torch.float32)


def numbered(requests: list[Request]) -> list[Request]:
    for request_id, one in enumerate(requests):
        one.request_id = request_id
    return requests


@settings(max_examples=examples(150), deadline=None)
@given(requests=ROWS, seed=st.integers(0, 99))
def test_every_sampled_token_equals_the_oracles(requests, seed):
    logits = some_logits(len(numbered(requests)), seed, torch.float64)
    sampled = Sampler().sample(logits, requests)
    for row, request in enumerate(requests):
        params = request.sampling
        chances = probabilities(logits[row].numpy(), request, params)
        mass = np.cumsum(chances)
        drawn = uniform(params.seed, request.total_tokens)
        token = int(sampled.ids[row])
        assert chances[token] > 0.0
        if params.temperature:
            assert mass[token] - chances[token] - 1e-9 <= drawn <= mass[token] + 1e-9


@settings(max_examples=examples(100), deadline=None)
@given(requests=ROWS, seed=st.integers(0, 99), data=st.data())
def test_a_row_is_sampled_the_same_in_any_batch(requests, seed, data):
    """A row gets the same ids and logprobs, bit for bit in float32, alone, in a shuffled batch, and
    with a sampler that was used before.
    """
    numbered(requests)
    logits = some_logits(len(requests), seed)
    sampler = Sampler()
    together = sampler.sample(logits, requests)
    order = data.draw(st.permutations(range(len(requests))))
    shuffled = sampler.sample(logits[order], [requests[row] for row in order])
    for place, row in enumerate(order):
        alone = Sampler().sample(logits[row : row + 1], [requests[row]])
        assert alone.ids[0] == together.ids[row] == shuffled.ids[place]
        assert alone.logprobs[0] == together.logprobs[row] == shuffled.logprobs[place]


def test_penalty_counts_kept_between_steps_equal_a_new_count():
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2
    )
    kept = Sampler()
    requests = numbered([asking(params, [1, 2, 2], []), asking(params, [3], [])])
    for step in range(200):
        logits = some_logits(2, step, torch.float64)
        present = requests[: 1 + (step % 7 != 0)]  # the second is away now and then
        ids = kept.sample(logits[: len(present)], present).ids.tolist()
        for row, request in enumerate(present):
            right = int(np.argmax(penalized(logits[row].numpy(), request, params)))
            assert ids[row] == right
            request.output.append(right)
    reborn = asking(params, [7], [])  # the same id, another request
    logits = some_logits(1, 1, torch.float64)
    assert kept.sample(logits, [reborn]).ids == Sampler().sample(logits, [reborn]).ids


@pytest.mark.parametrize(
    ("params", "kinds"),
    [
        (SamplingParams(seed=1), 12),
        (SamplingParams(seed=2, temperature=1.7, top_k=10), 10),
        (SamplingParams(seed=3, temperature=0.8, top_p=0.9, min_p=0.01), 8),
    ],
)
def test_tokens_are_sampled_as_often_as_their_probability(params, kinds):
    """Sampled tokens come as often as their probability says, by Pearson's chi square at fixed
    seeds. The positions of one request are independent draws.
    """
    draws = 20_000
    logits = torch.tensor([[1.5, 0.9, -1.0, 0.2, 0.0, -0.4, 1.1, -0.2, 0.4, 0.6, 0.1, -0.7]])
    request = asking(params, [0], [])
    chances = probabilities(logits[0].double().numpy(), request, params)
    seen = np.zeros(len(chances))
    # One row for each position: the same request, further along.
    zeros = np.zeros(draws, dtype=np.int32)
    rows = [Request(at, zeros[: at + 1], 1, sampling=params) for at in range(draws)]
    for start in range(0, draws, 5000):
        ids = Sampler().sample(logits.expand(5000, -1), rows[start : start + 5000]).ids
        seen += np.bincount(ids.numpy(), minlength=len(chances))
    expected = chances * draws
    live = expected > 0
    assert live.sum() == kinds
    assert seen[~live].sum() == 0
    statistic = float((((seen - expected) ** 2)[live] / expected[live]).sum())
    assert statistic < CHI_SQUARE_999[int(live.sum()) - 1]


def test_choices_of_one_seed_are_not_correlated():
    """The seeds derived for the choices of a request (n > 1) give pairs of draws that fill the unit
    square evenly.
    """
    choices = SamplingParams(seed=9, n=2).choices(0)
    first, second = ([uniform(one.seed, at) for at in range(10_000)] for one in choices)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.04
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.04
    assert 0.0 <= min(first) < 0.001
    assert 0.999 < max(first) < 1.0


def test_logprobs_come_from_the_logits_before_penalties():
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, logprobs=3)
    logits = some_logits(1, 5)
    plain = logits[0].double().log_softmax(0).numpy()
    request = asking(params, [0], np.argsort(-plain)[:5].tolist())
    sampled = Sampler().sample(logits, [request])
    found = sampled.logprobs[0]
    assert found is not None
    token = int(sampled.ids[0])
    assert found.logprob == pytest.approx(plain[token], abs=1e-12)
    assert [one for one, _ in found.top] == np.argsort(-plain)[:3].tolist()
    bare = Sampler().sample(logits, [asking(replace(params, logprobs=0), [0], [])])
    assert bare.logprobs[0] is not None
    assert bare.logprobs[0].top == []


def test_end_of_text_is_not_sampled_before_min_tokens():
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 50.0
    params = SamplingParams(temperature=0.0, min_tokens=2)
    assert Sampler().sample(logits, [asking(params, [1], [9])]).ids.tolist() == [0]
    assert Sampler().sample(logits, [asking(params, [1], [9, 9])]).ids.tolist() == [5]


def test_columns_without_a_token_are_never_sampled():
    logits = torch.zeros(2, VOCAB)
    logits[:, 30:] = 50.0
    requests = numbered([asking(None, [1], []), asking(SamplingParams(seed=1), [1], [])])
    assert Sampler(tokens=30).sample(logits, requests).ids.max() < 30


def test_a_row_with_nan_is_reported_and_other_rows_are_sampled():
    logits = some_logits(4, 1)
    logits[0, 7] = torch.nan
    logits[1, 7] = torch.inf
    logits[2] = -torch.inf
    for params in (None, SamplingParams(seed=4, top_p=0.5, top_k=3, logprobs=2)):
        requests = numbered([asking(params, [1], []) for _ in range(4)])
        ids = Sampler().sample(logits, requests).ids.tolist()
        assert ids[:3] == [-1, -1, -1]
        assert ids[3] == Sampler().sample(logits[3:], requests[3:]).ids.item()


def test_sampling_does_not_change_the_logits():
    logits = some_logits(1, 1)
    before = logits.clone()
    params = SamplingParams(seed=1, top_k=2, top_p=0.5, presence_penalty=1.0, min_tokens=9)
    Sampler().sample(logits, [asking(params, [1], [2])])
    assert torch.equal(logits, before)


def test_half_precision_logits_are_sampled_in_float32():
    logits = some_logits(1, 1).bfloat16()
    request = asking(SamplingParams(seed=1, logprobs=1), [1], [])
    half, full = (Sampler().sample(one, [request]) for one in (logits, logits.float()))
    assert half.ids == full.ids
    assert half.logprobs == full.logprobs


def test_a_wrong_number_of_rows_is_rejected():
    with pytest.raises(ValueError, match=r"\(2, 40\) for 1 requests"):
        Sampler().sample(some_logits(2, 0), [asking(None, [1], [])])
