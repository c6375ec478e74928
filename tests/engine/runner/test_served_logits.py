"""Tests that each served token comes from the logits that transformers computes for its position.

Many requests share prefixes, have several choices, and run in a cache that holds few of them. So
prompts are computed in chunks next to decodes, found cached, preempted, and computed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.capacity import Limits
from engine.model.tiny import TinySettings
from engine.runner.load import Loaded, load
from engine.runner.needs import LoadSettings, StepSettings
from engine.runner.torch_sampler import Sampler
from engine.sampling.params import SamplingParams
from engine.scheduler.types import SchedulerSettings
from tests.engine.real import BLOCK_SIZE
from tests.engine.runner.arrivals import BLOCKS, Arrival, served
from tests.engine.tiny_models import some_ids, written

OUTPUT_TOKENS = 24
# By name: all have a rotation worth the test (Llama 3's, or Qwen's own with norms of heads).
SETTINGS = {
    "llama": TinySettings("llama"),
    "llama-tied": TinySettings("llama", is_tied=True),
    "qwen3": TinySettings("qwen3"),
}
# In CI, stages are tested by logits in test_group, and there also by a worker's tokens.
SERVED = [
    ("llama", (1, 1), False),
    ("llama-tied", (1, 1), True),
    ("qwen3", (1, 1), True),
    ("llama-tied", (2, 1), False),
    *(
        pytest.param(name, ranks, overlaps, marks=pytest.mark.full)
        for name in SETTINGS
        for ranks in ((2, 1), (1, 2), (2, 2))
        for overlaps in (False, True)
    ),
]
Rows = dict[tuple[int, int], torch.Tensor]  # logits by request and position


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Record the logits that reach the sampler, which samples as before; return them by request and
    position.
    """
    found: Rows = {}
    sample = Sampler.sample

    def kept(self: Sampler, logits: torch.Tensor, requests: Any, positions: Any, *more: Any) -> Any:
        for row, request, at in zip(logits, requests, positions, strict=True):
            found[request.request_id, at] = row.double().clone()
        return sample(self, logits, requests, positions, *more)

    monkeypatch.setattr(Sampler, "sample", kept)
    return found


def model_of(folder: Path, dtype: str, ranks: tuple[int, int], overlaps: bool) -> Loaded:
    limits = Limits(
        block_size=BLOCK_SIZE,
        max_tokens_in_paged_kv_cache=BLOCKS * BLOCK_SIZE,
        expected_input_tokens=8,
        expected_output_tokens=8,
    )
    settings = LoadSettings(
        folder,
        limits,
        dtype=dtype,
        threads=1,
        tp_size=ranks[0],
        pp_size=ranks[1],
        steps=StepSettings(overlap=overlaps),
    )
    scheduler = SchedulerSettings(max_num_tokens=24, max_batch_size=4, min_chunk_tokens=4)
    return load(settings, scheduler)


def crowd() -> list[Arrival]:
    """Return two requests with one shared prefix, three choices of a prompt that extends it, and
    one other request.
    """
    ids = some_ids(60)
    sampled = SamplingParams(temperature=1.0, seed=7, n=3).choices(0)
    asked = [(ids[:33], SamplingParams(temperature=0.0), 0), (ids[:20], sampled[0], 0)]
    asked += [([*ids[:33], 5, 9], one, 3) for one in sampled]
    asked += [(ids[40:], SamplingParams(temperature=0.7, seed=1, presence_penalty=0.5), 9)]
    return [
        Arrival(tuple(prompt), OUTPUT_TOKENS, params, frozenset(), at_step, None)
        for prompt, params, at_step in asked
    ]


def logits_of_transformers(
    folder: Path, texts: Sequence[Sequence[int]], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return the logits [tokens, vocab] that transformers computes for each text, one text at a
    time.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    with torch.inference_mode():
        return [model(torch.tensor([list(text)])).logits[0].double() for text in texts]


def served_and_expected_logits(
    folder: Path, model: Loaded, rows: Rows, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return, for each request, the logits [OUTPUT_TOKENS, vocab] of its tokens as they were served
    and by transformers.
    """
    arrivals = crowd()
    try:
        clients = asyncio.run(served(model, arrivals))
    finally:
        model.model.close()
    scheduler = clients.runner.scheduler
    assert scheduler.preemptions_total, "nobody was put back"
    assert scheduler.prefix_hit_tokens_total, "nothing was found cached"
    said = [[token for token, _ in clients.tokens[number]] for number in range(len(arrivals))]
    assert {len(tokens) for tokens in said} == {OUTPUT_TOKENS}
    texts = [[*one.prompt, *tokens] for one, tokens in zip(arrivals, said, strict=True)]
    pairs = []
    for number, exact in enumerate(logits_of_transformers(folder, texts, dtype)):
        first = len(arrivals[number].prompt)
        positions = range(first, first + OUTPUT_TOKENS)
        ours = torch.stack([rows[number, at] for at in positions])
        pairs.append((ours, exact[first - 1 : -1]))
    return pairs


@pytest.mark.parametrize(("name", "ranks", "overlaps"), SERVED)
def test_each_token_has_the_logits_of_transformers(
    name: str, ranks: tuple[int, int], overlaps: bool, rows: Rows, tmp_path: Path
) -> None:
    folder = written(tmp_path, SETTINGS[name])
    model = model_of(folder, "float64", ranks, overlaps)
    for ours, theirs in served_and_expected_logits(folder, model, rows, torch.float64):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_bfloat16_logits_differ_from_transformers_only_by_rounding(
    name: str, rows: Rows, tmp_path: Path
) -> None:
    folder = written(tmp_path, SETTINGS[name])
    model = model_of(folder, "bfloat16", (1, 1), True)
    for ours, theirs in served_and_expected_logits(folder, model, rows, torch.bfloat16):
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-2
