"""A worker in this process that computes with a tiny random model, and the tokens that it must
give.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import torch

from engine.capacity import Limits
from engine.cli.serve import served
from engine.model.batch import Piece, flat_batch
from engine.model.checkpoint import Checkpoint
from engine.model.config import PLAIN, Quantization, read_config
from engine.model.kv_cache import KvCache
from engine.model.transformer import Transformer
from engine.runner.load import Loaded, load
from engine.runner.needs import PLAIN_STEPS, LoadSettings, StepSettings
from engine.scheduler.types import SchedulerSettings
from engine.server import WorkerSettings, serving
from tests.engine.harness import Running

BLOCK_SIZE = 8
COMPLETIONS = "/v1/completions"


def loaded(
    directory: Path,
    kv_tokens: int = 4096,
    quantization: Quantization = PLAIN,
    ranks: tuple[int, int] = (1, 1),
    steps: StepSettings = PLAIN_STEPS,
    attention: str = "auto",
    int8: str = "auto",
    block_size: int = BLOCK_SIZE,
    shares_kv: bool = False,
    host_kv_tokens: int = 0,
    **scheduler: Any,
) -> Loaded:
    """Load the model in `directory`. `ranks` are its numbers of tensor-parallel ranks and of
    stages; `scheduler` has limits of its scheduler.
    """
    limits = Limits(
        block_size=block_size,
        max_tokens_in_paged_kv_cache=kv_tokens,
        expected_input_tokens=8,
        expected_output_tokens=8,
        host_kv_tokens=host_kv_tokens,
    )
    # One thread, because threads of such small matrices only wait for each other.
    settings = SchedulerSettings(**scheduler)
    tp_size, pp_size = ranks
    made = LoadSettings(
        directory,
        limits,
        threads=1,
        quantization=quantization,
        tp_size=tp_size,
        pp_size=pp_size,
        steps=steps,
        attention=attention,
        int8=int8,
        shares_kv=shares_kv,
    )
    return load(made, settings)


@contextlib.asynccontextmanager
async def computing(model: Loaded, **changes: Any) -> AsyncIterator[Running]:
    """Yield a worker that serves `model`, with `changes` to its settings."""
    settings = WorkerSettings(
        profile_name=None,
        kv_tokens=model.capacity.tokens,
        block_size=model.capacity.block_size,
        model_name="tiny",
        host_kv_tokens=model.capacity.host_blocks * model.capacity.block_size,
        port=0,
        grace_s=0.0,
        scheduler=model.scheduler,
        **changes,
    )
    async with (
        serving(settings, model.tokenizer, served(model)) as (url, worker),
        aiohttp.ClientSession() as http,
    ):
        yield Running(url, worker, http)


def greedy(prompt: object, tokens: int, **fields: object) -> dict[str, object]:
    """Return the body of a request for `tokens` tokens, chosen greedily."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return body | {"return_token_ids": True} | fields


async def ids_of(worker: Running, body: dict[str, object]) -> list[int]:
    """Post `body` and return the token ids of the first choice."""
    status, answer = await worker.post(COMPLETIONS, body)
    assert status == 200, answer
    return answer["choices"][0]["token_ids"]  # type: ignore[no-any-return]


class Reference:
    """Computes greedy tokens of one prompt at a time, without scheduler, batch, chunks or cache
    hits.
    """

    def __init__(self, directory: Path) -> None:
        config = read_config(directory)
        with Checkpoint(directory) as checkpoint:
            self._model = Transformer(config, checkpoint)
        self._config = config
        torch.set_num_threads(1)

    def greedy(self, prompt: Sequence[int], count: int, ends: bool = False) -> list[int]:
        """Return the `count` likeliest next tokens; if `ends` is true, stop at the model's end
        token.
        """
        blocks = -(-(len(prompt) + count) // BLOCK_SIZE)
        kv = KvCache(self._config, blocks, BLOCK_SIZE)
        said: list[int] = []
        tokens, start = list(prompt), 0
        for _ in range(count):
            batch = flat_batch([Piece(tokens, start, range(blocks))], BLOCK_SIZE)
            said.append(int(torch.argmax(self._model.forward(batch, kv)[0])))
            if ends and said[-1] in self._config.eos_ids:
                break
            start += len(tokens)
            tokens = said[-1:]
        return said
